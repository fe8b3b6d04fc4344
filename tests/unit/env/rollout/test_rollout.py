from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace
from typing import Any

import pytest

from grpo_core.clients.inference import Completion, GenerationClient
from grpo_core.errors import ProtocolViolation
from grpo_core.wire.policy_version import PolicyVersion
from grpo_env.rollout.rollout import FailureReason, Rollout, RolloutFailure, SamplingPlan, roll_out
from grpo_env.rollout.training_sequences import MisalignedCompletion, align_group
from grpo_env.tasks import Answer, Item, Message
from grpo_env.tasks.arithmetic import Sum
from tests.support.wait import DEADLINE_S
from tests.unit.env.canned import PROMPT, generate_answer
from tests.unit.env.http_stub import StubServer, stub_server

PLAN = SamplingPlan(
    group_size=2,
    temperature=0.7,
    max_token_length=100,
    max_completion_tokens=16,
    drop_equal_scores=True,
)
SEVEN_OR_EIGHT = generate_answer(["7", "8"])


async def sample(
    answer: dict[str, Any],
    status: int = 200,
    item: Item = Sum(3, 4),  # noqa: B008 - frozen
    **changes: Any,
) -> tuple[Rollout | RolloutFailure, StubServer]:
    with stub_server({"POST /generate": lambda _body: (status, answer)}) as server:
        async with GenerationClient(server.url + "/v1", 60.0, max_connections=8) as client:
            return await roll_out(client, item, PROMPT, replace(PLAN, **changes)), server


async def failure(answer: dict[str, Any], **how: Any) -> RolloutFailure:
    outcome, _ = await sample(answer, **how)
    assert isinstance(outcome, RolloutFailure)
    return outcome


async def test_one_request_makes_one_aligned_group() -> None:
    outcome, server = await sample(SEVEN_OR_EIGHT)

    assert server.bodies("POST /generate") == [
        {
            "prompt": {"prompt_token_ids": PROMPT},
            "logprobs": 0,
            "n": 2,
            "temperature": 0.7,
            "max_tokens": 16,
        }
    ]
    assert isinstance(outcome, Rollout)
    group = outcome.group
    assert group.tokens == [[5, 6, 7, 90, 91], [5, 6, 7, 91, 91]]
    assert group.masks == [[-100, -100, -100, 90, 91], [-100, -100, -100, 91, 91]]
    assert group.inference_logprobs == [[1.0, 1.0, 1.0, -0.5, -1.25]] * 2
    assert group.scores == [1.0, 0.0]
    assert group.generation_params == {"temperature": 0.7, "max_tokens": 16}
    assert group.messages == [
        [{"role": "user", "content": "3+4="}, {"role": "assistant", "content": text}]
        for text in ("7", "8")
    ]
    overrides = group.group_overrides
    assert overrides is not None
    # For each completion, the policy versions of its first and last token.
    assert overrides["policy_version"] == [[[1, 0], [1, 1]], [[1, 1], [1, 2]]]
    assert overrides["generation_seconds"] > 0.0
    assert outcome.rewards == (1.0, 0.0)
    assert outcome.completion_tokens == 4


async def test_a_sequence_of_the_maximum_length_drops_the_group_but_keeps_its_rewards() -> None:
    # A prompt of 3 tokens and a completion of 2 are 5 tokens.
    outcome, server = await sample(SEVEN_OR_EIGHT, max_token_length=5)

    assert server.bodies("POST /generate")[0]["max_tokens"] == 2
    assert isinstance(outcome, RolloutFailure)
    assert outcome.reason is FailureReason.TOO_LONG
    assert outcome.rewards == (1.0, 0.0)
    kept, _ = await sample(SEVEN_OR_EIGHT, max_token_length=6)
    assert isinstance(kept, Rollout)


class NotGradable:
    """The score is the answer's number, including "nan" and "inf"; "?" raises `ValueError`."""

    messages: tuple[Message, ...] = ({"role": "user", "content": "?"},)

    def grade(self, answer: Answer) -> float:
        if answer.text == "?":
            raise ValueError("no number in the answer")
        return float(answer.text)


async def test_answers_without_a_grade_are_never_scored_and_quarantine_the_group() -> None:
    answer = generate_answer(["0.5", "nan", "?", "inf", "-1"])
    quarantined = await failure(answer, item=NotGradable(), group_size=5)

    assert quarantined.reason is FailureReason.QUARANTINED_REWARD
    assert quarantined.rewards == (0.5, -1.0)
    assert quarantined.detail == (
        "completion 1: score nan is not a finite number; completion 2: no number in the answer; "
        "completion 3: score inf is not a finite number"
    )


async def test_an_aborted_completion_is_not_graded() -> None:
    aborted = await failure(generate_answer(["7", "8"], finish_reasons=["stop", "abort"]))

    assert aborted.reason is FailureReason.ABORTED
    assert aborted.rewards == ()


class WatchedItem:
    """Records the answers to grade, and grades them when the test allows it."""

    messages: tuple[Message, ...] = ({"role": "user", "content": "?"},)

    def __init__(self) -> None:
        self.may_grade = threading.Event()
        self.graded: list[Answer] = []

    def grade(self, answer: Answer) -> float:
        assert self.may_grade.wait(DEADLINE_S)
        self.graded.append(answer)
        return float(len(self.graded))


async def test_slow_grading_does_not_hold_up_other_groups_and_learns_what_was_cut_off() -> None:
    slow = WatchedItem()
    answer = generate_answer(["7", "8"], finish_reasons=["stop", "length"])
    waiting = asyncio.create_task(sample(answer, item=slow))
    outcome, _ = await sample(SEVEN_OR_EIGHT)
    assert isinstance(outcome, Rollout)
    slow.may_grade.set()
    assert isinstance((await waiting)[0], Rollout)
    assert slow.graded == [Answer("7", finished=True), Answer("8", finished=False)]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (generate_answer(["7"]), "1 completions instead of 2"),
        (generate_answer(["7", "8"], prompt_token_ids=[1, 5, 6, 7]), "differ from the request"),
    ],
)
async def test_an_answer_against_the_contract_is_an_error(
    answer: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ProtocolViolation, match=problem):
        await sample(answer)


def completion(token_ids: list[int], logprobs: list[float]) -> Completion:
    return Completion("", "stop", token_ids, logprobs, PolicyVersion(0, 0), PolicyVersion(0, 0))


@pytest.mark.parametrize("bad", [math.nan, -math.inf, 1e-5])
def test_an_impossible_logprob_is_named_with_its_place(bad: float) -> None:
    """Rounding may raise a logprob to 1e-6 above 0."""
    broken = completion([3, 3, 3], [-0.1, 1e-6, bad])
    with pytest.raises(MisalignedCompletion) as caught:
        align_group([1], [completion([2], [-0.1]), completion([], []), broken])
    named = f"completion 1: no tokens; completion 2: invalid logprob {bad} at token 2"
    assert str(caught.value).endswith(named)
