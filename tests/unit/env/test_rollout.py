from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import pytest

from grpo_core.errors import ProtocolViolation
from grpo_core.inference_client import GenerationClient
from grpo_env.alignment import MisalignedCompletion
from grpo_env.rollout import FailureReason, Rollout, RolloutFailure, SamplingPlan, roll_out
from grpo_env.tasks import Answer, Item, Message
from grpo_env.tasks.arithmetic import Sum
from tests.unit.env.canned import PROMPT, generate_answer
from tests.unit.env.http_stub import Answer as HttpAnswer
from tests.unit.env.http_stub import StubServer, stub_server
from tests.unit.env.test_grading import NotGradable

PLAN = SamplingPlan(
    group_size=2,
    temperature=0.7,
    max_token_length=100,
    max_completion_tokens=16,
    drop_equal_scores=True,
)


async def sample(
    answer: dict[str, Any],
    status: int = 200,
    item: Item = Sum(3, 4),  # noqa: B008 - frozen
    **changes: Any,
) -> tuple[Rollout | RolloutFailure, StubServer]:
    def generate(_body: dict[str, Any]) -> HttpAnswer:
        return status, answer

    plan = SamplingPlan(**{**PLAN.__dict__, **changes})
    with stub_server({"POST /generate": generate}) as server:
        async with GenerationClient(server.url + "/v1", deadline_s=60.0) as client:
            return await roll_out(client, item, PROMPT, plan), server


async def test_one_request_makes_one_aligned_group() -> None:
    outcome, server = await sample(generate_answer(["7", "8"]))

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
    assert outcome.rewards == (1.0, 0.0)
    assert outcome.completion_tokens == 4


async def test_versions_of_first_and_last_token_and_the_duration_are_carried() -> None:
    outcome, _ = await sample(generate_answer(["7", "8"]))

    assert isinstance(outcome, Rollout)
    overrides = outcome.group.group_overrides
    assert overrides is not None
    assert overrides["policy_version"] == [[[1, 0], [1, 1]], [[1, 1], [1, 2]]]
    assert 0.0 < overrides["generation_seconds"] < 60.0


async def test_a_sequence_of_the_maximum_length_drops_the_group_but_keeps_its_rewards() -> None:
    # Prompt 3 + completion 2 = 5 tokens.
    outcome, server = await sample(generate_answer(["7", "8"]), max_token_length=5)

    assert server.bodies("POST /generate")[0]["max_tokens"] == 2
    assert isinstance(outcome, RolloutFailure)
    assert outcome.reason is FailureReason.TOO_LONG
    assert outcome.rewards == (1.0, 0.0)
    kept, _ = await sample(generate_answer(["7", "8"]), max_token_length=6)
    assert isinstance(kept, Rollout)


async def test_equal_scores_are_dropped_only_where_configured() -> None:
    dropped, _ = await sample(generate_answer(["7", "7"]))
    kept, _ = await sample(generate_answer(["7", "7"]), drop_equal_scores=False)

    assert isinstance(dropped, RolloutFailure)
    assert dropped.reason is FailureReason.EQUAL_SCORES
    assert dropped.rewards == (1.0, 1.0)
    assert isinstance(kept, Rollout)


@pytest.mark.parametrize("text", ["nan", "?", "inf"])
async def test_a_reward_that_is_no_number_quarantines_the_group(text: str) -> None:
    outcome, _ = await sample(generate_answer(["0.5", text]), item=NotGradable())

    assert isinstance(outcome, RolloutFailure)
    assert outcome.reason is FailureReason.QUARANTINED_REWARD
    assert outcome.rewards == (0.5,)


async def test_an_aborted_completion_is_not_graded() -> None:
    outcome, _ = await sample(generate_answer(["7", "8"], finish_reasons=["stop", "abort"]))

    assert isinstance(outcome, RolloutFailure)
    assert outcome.reason is FailureReason.ABORTED
    assert outcome.rewards == ()


class WatchedItem:
    """Remembers what it was asked to grade; grades nothing before it may."""

    def __init__(self) -> None:
        self.may_grade = threading.Event()
        self.graded: list[Answer] = []

    @property
    def messages(self) -> list[Message]:
        return [{"role": "user", "content": "?"}]

    def grade(self, answer: Answer) -> float:
        assert self.may_grade.wait(timeout=60)
        self.graded.append(answer)
        return float(len(self.graded))


async def test_grading_learns_which_answers_were_cut_off() -> None:
    item = WatchedItem()
    item.may_grade.set()
    await sample(generate_answer(["7", "8"], finish_reasons=["stop", "length"]), item=item)

    assert item.graded == [Answer("7", finished=True), Answer("8", finished=False)]


async def test_slow_grading_does_not_hold_up_other_groups() -> None:
    slow = WatchedItem()
    waiting = asyncio.create_task(sample(generate_answer(["7", "8"]), item=slow))
    for _ in range(3):
        outcome, _ = await sample(generate_answer(["7", "8"]))
        assert isinstance(outcome, Rollout)
    slow.may_grade.set()
    assert isinstance((await waiting)[0], Rollout)


async def test_a_refused_request_is_data_and_carries_the_server_s_reason() -> None:
    outcome, server = await sample({"detail": "prompt beyond the context"}, status=422)

    assert isinstance(outcome, RolloutFailure)
    assert outcome.reason is FailureReason.REFUSED
    assert "prompt beyond the context" in outcome.detail
    assert len(server.seen) == 1


async def test_a_prompt_that_leaves_no_room_is_never_sent() -> None:
    outcome, server = await sample(generate_answer(["7", "8"]), max_token_length=3)

    assert isinstance(outcome, RolloutFailure)
    assert outcome.reason is FailureReason.REFUSED
    assert server.seen == []


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (generate_answer(["7"]), "1 completions instead of 2"),
        (generate_answer(["7", "8"], prompt_token_ids=[1, 5, 6, 7]), "not the ones sent"),
        (generate_answer(["7", "8"], token_ids=[[90], [91, 91]]), "disagree"),
        (generate_answer(["7", "8"], finish_reasons=["stop", None]), "breaks the contract"),
    ],
)
async def test_an_answer_against_the_contract_is_an_error(
    answer: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ProtocolViolation, match=problem):
        await sample(answer)


@pytest.mark.parametrize("logprob", [math.nan, 0.5])
async def test_an_impossible_logprob_is_an_error(logprob: float) -> None:
    answer = generate_answer(["7", "8"])
    answer["logprobs"][1][0] = [{"91": logprob}]

    # Python's JSON writes NaN as such, which the client's parser already refuses.
    with pytest.raises((MisalignedCompletion, ProtocolViolation)):
        await sample(answer)
