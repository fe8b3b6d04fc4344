"""The rollout engine, and the producer of groups, with a scripted inference server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from grpo_core.errors import ProtocolViolation, RequestRefused, ServiceUnavailable
from grpo_core.rollouts.files import steps_in
from grpo_core.wire.scored_group import ScoredGroup
from grpo_env.assembly import TaskSet, sampling_plan
from grpo_env.evaluation import Evaluation
from grpo_env.rollout.groups import (
    FailureReason,
    GroupLost,
    MisalignedCompletion,
    SampledGroup,
    SamplingPlan,
)
from grpo_env.rollout.producer import GroupCounts, GroupProducer
from grpo_env.settings import EnvServerSettings, load_env_settings
from grpo_env.tasks.item_stream import ItemStream
from grpo_env.tasks.items import Draw, Item
from tests.support.canned import PROMPT, generate_answer
from tests.support.http_stub import Route
from tests.unit.env.feeding import Rewarded, right_and_wrong, sevens
from tests.unit.env.rollout.rig import (
    PLAN,
    engine_on,
    item_of,
    lost,
    sample,
    submitted,
)

SEVEN_OR_EIGHT = generate_answer(["7", "8"])


def always(answer: dict[str, Any]) -> Route:
    return lambda _body: (200, answer)


async def test_one_request_makes_one_aligned_group() -> None:
    outcome, server = await sample(always(SEVEN_OR_EIGHT))

    assert server.bodies("POST /generate") == [
        {
            "prompt": {"prompt_token_ids": PROMPT},
            "logprobs": 0,
            "n": 2,
            "temperature": 0.7,
            "max_tokens": 16,
        }
    ]
    group = submitted(outcome)
    assert group.tokens == [[5, 6, 7, 90, 91], [5, 6, 7, 91, 91]]
    assert group.masks == [[-100, -100, -100, 90, 91], [-100, -100, -100, 91, 91]]
    assert group.inference_logprobs == [[1.0, 1.0, 1.0, -0.5, -1.25]] * 2
    assert group.scores == [1.0, 0.0]
    assert group.generation_params == {"temperature": 0.7, "max_tokens": 16}
    assert group.messages == [
        [{"role": "user", "content": "3+4="}, {"role": "assistant", "content": text}]
        for text in ("7", "8")
    ]
    assert group.overrides == [
        {"reward_parts": {"reward": score}, "finish_reason": "stop", "rollout_index": index}
        for index, score in enumerate((1.0, 0.0))
    ]
    overrides = group.group_overrides
    assert overrides is not None
    # For each completion, the policy versions of its first and last token.
    assert overrides["policy_version"] == [[[1, 0], [1, 1]], [[1, 1], [1, 2]]]
    assert overrides["generation_seconds"] > 0.0
    assert (overrides["task"], len(overrides["item"])) == ("rewarded", 16)
    assert [grade.score for grade in outcome.grades] == [1.0, 0.0]
    assert outcome.completion_tokens == 4


async def test_a_sequence_of_the_maximum_length_drops_the_group_but_keeps_its_rewards() -> None:
    # A prompt of 3 tokens and a completion of 2 are 5 tokens.
    outcome, server = await sample(always(SEVEN_OR_EIGHT), plan=replace(PLAN, max_token_length=5))

    assert server.bodies("POST /generate")[0]["max_tokens"] == 1
    assert lost(outcome).reason is FailureReason.TOO_LONG
    assert [grade.score for grade in outcome.grades] == [1.0, 0.0]
    kept, _ = await sample(always(SEVEN_OR_EIGHT), plan=replace(PLAN, max_token_length=6))
    submitted(kept)


async def test_an_aborted_completion_is_not_graded() -> None:
    answer = generate_answer(["7", "8"], finish_reasons=["stop", "abort"])
    aborted, _ = await sample(always(answer))
    assert lost(aborted).reason is FailureReason.ABORTED
    assert (aborted.grades, aborted.completion_tokens) == ((), 4)


async def test_the_reward_learns_what_was_cut_off_and_its_advantage_can_be_masked() -> None:
    seen: dict[str, bool] = {}

    def reward(answer: Any, _row: Any) -> float:
        seen[str(answer)] = answer.finished
        # Nothing has answered: calls count in every form.
        assert (answer.call_format, answer.state.turn) == (None, 0)
        return float(answer == "7")

    outcome, _ = await sample(
        always(generate_answer(["7", "8"], finish_reasons=["stop", "length"])),
        Rewarded(reward),
        replace(PLAN, mask_cut_off=True),
    )
    assert seen == {"7": True, "8": False}
    overrides = submitted(outcome).overrides or []
    assert [o.get("set_advantage_to_zero") for o in overrides] == [None, True]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {}),
        (("--top-p=0.9", "--top-k=5"), {"top_p": 0.9, "top_k": 5}),
        (("--repetition-penalty=1.1", "--top-k=0"), {"repetition_penalty": 1.1}),
    ],
)
async def test_options_that_reshape_the_distribution_are_sent_and_stated_unless_neutral(
    options: tuple[str, ...], expected: dict[str, float]
) -> None:
    settings = load_env_settings(["arithmetic", "serve", "--model=m", "--group-size=2", *options])
    plan = sampling_plan(settings, TaskSet((Rewarded(sevens),), (1.0,)))
    outcome, server = await sample(always(SEVEN_OR_EIGHT), plan=plan)
    (body,) = server.bodies("POST /generate")
    stated = submitted(outcome).generation_params
    assert stated == {"temperature": 1.0, "max_tokens": body["max_tokens"], **expected}
    assert stated.items() <= body.items()
    assert Evaluation.of(settings).plan(plan).distribution == {"temperature": 1.0}


def test_the_completion_limit_grows_with_the_run() -> None:
    plan = replace(PLAN, max_completion_tokens=100, start_completion_tokens=20)
    limits = [
        replace(plan, step=step, steps=8).completion_limit(Rewarded(sum), 500) for step in (0, 2, 8)
    ]
    assert limits == [20, 40, 100]
    assert plan.completion_limit(Rewarded(sum), 60) == 60


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
        await sample(always(answer))


@pytest.mark.parametrize("bad", [math.nan, -math.inf, 1e-5])
async def test_an_impossible_logprob_is_named_with_its_place(bad: float) -> None:
    """Rounding may raise a logprob to 1e-6 above 0."""
    answer = generate_answer(
        ["7", "8", "9"],
        token_ids=[[2], [], [3, 3, 3]],
        logprobs=[[[{"2": -0.1}]], [], [[{"3": -0.1}], [{"3": 1e-6}], [{"3": bad}]]],
    )
    with pytest.raises(MisalignedCompletion) as caught:
        await sample(always(answer), plan=replace(PLAN, group_size=3))
    named = f"completion 1: no tokens; completion 2: invalid logprob {bad} at token 2"
    assert str(caught.value).endswith(named)


async def test_a_group_belongs_to_the_run_in_which_its_sampling_began() -> None:
    """run-api is reset, and the environment registers again, while the group is sampled."""
    settings, seen = EnvServerSettings(task="arithmetic", model="m"), []

    async def submit(group: ScoredGroup, run_uuid: str, _positions: object) -> None:
        seen.append((group.env_id, run_uuid))

    def generate(_body: dict[str, Any]) -> Any:
        producer.join(1, "new run")
        return 200, generate_answer(["7", "8"])

    async with engine_on(generate) as (engine, _):
        items = ItemStream([([item_of(Rewarded(sevens))], 1.0)], seed=0)
        client: Any = SimpleNamespace(submit=submit)
        producer = GroupProducer(settings, items, engine, client)
        producer.join(0, "old run")
        await producer.produce(PLAN, 0)
        await producer.produce(PLAN, 0)
    assert seen == [(0, "old run"), (1, "new run")]


async def test_dropped_groups_are_kept_of_the_run_that_the_environment_has_joined(
    tmp_path: Path,
) -> None:
    """It joins the second run, at an earlier step, while a group of the first is sampled."""
    settings = EnvServerSettings(task="arithmetic", model="m", untrained_dir=tmp_path)

    def generate(_body: dict[str, Any]) -> Any:
        producer.join(1, "new run")
        return 200, generate_answer(["7", "7"])

    async with engine_on(generate) as (engine, _):
        items = ItemStream([([item_of(Rewarded(sevens))], 1.0)], seed=0)
        producer = GroupProducer(settings, items, engine, Mock())
        producer.untrained.drop(50, SampledGroup())
        await producer.produce(PLAN, 8)
        assert producer.untrained.examples == ""
        await producer.produce(PLAN, 0)
    await producer.untrained.save_dropped()
    assert steps_in(tmp_path / "dropped") == [1]


async def test_an_item_learns_of_its_graded_and_of_its_lost_groups() -> None:
    rewards = iter([1.0, 0.0, math.nan, 0.0])
    item = item_of(Rewarded(lambda *_: next(rewards)))
    items, client = Mock(draw=lambda: Draw(item, 0, 0)), Mock(submit=AsyncMock())
    async with engine_on(right_and_wrong) as (engine, _):
        settings = EnvServerSettings(task="arithmetic", model="m", max_failed_rewards=1.0)
        producer = GroupProducer(settings, items, engine, client)
        await producer.produce(PLAN, 3)
        ((graded, scores, step),) = (call.args for call in items.graded.call_args_list)
        assert (graded, sorted(scores), step) == (item, [0.0, 1.0], 3)  # graded in any order
        items.lost.assert_not_called()
        await producer.produce(PLAN, 3)
        items.lost.assert_called_once_with(item)


async def test_an_item_that_no_server_sampled_is_given_again() -> None:
    """A dropped group used its item. run-api learns of both with the next group. A group that it
    refuses as one of an earlier run has its item in the next one."""
    item = item_of(Rewarded(sevens))
    stream = ItemStream([([replace(item, row={"n": n}) for n in range(9)], 1.0)], seed=0)
    equal = generate_answer(["7", "7"])
    answers = iter([SEVEN_OR_EIGHT, equal, SEVEN_OR_EIGHT, SEVEN_OR_EIGHT])
    asked: list[int] = []
    sent: list[Mapping[str, str]] = []

    async def submit(_group: ScoredGroup, _run_uuid: str, positions: Mapping[str, str]) -> None:
        sent.append(positions)
        if len(sent) == 2:
            raise RequestRefused("of another run", 409)

    async with engine_on(lambda _body: (200, next(answers))) as (engine, _):

        async def roll_out(item: Item, plan: SamplingPlan) -> SampledGroup:
            asked.append(item.row["n"])
            if len(asked) == 2:
                raise ServiceUnavailable("no server")
            return await engine.roll_out(item, plan)

        settings = EnvServerSettings(task="arithmetic", model="m")
        faulty: Any = SimpleNamespace(roll_out=roll_out, prompt_ids=engine.prompt_ids)
        client: Any = SimpleNamespace(submit=submit)
        producer = GroupProducer(settings, stream, faulty, client)
        for _ in range(5):
            await producer.produce(PLAN, 0)
    assert asked[1] == asked[2]
    assert asked[3] == asked[4]
    assert len({*asked}) == 3
    assert [[*positions.values()] for positions in sent] == [["0-0"], ["0-2"], ["0-2"]]


async def test_a_group_that_run_api_refuses_counts_once() -> None:
    settings = EnvServerSettings(task="arithmetic", model="m")
    client: Any = Mock(submit=AsyncMock(side_effect=RequestRefused("no", 422)))
    answers = iter([generate_answer(["7", "7"]), SEVEN_OR_EIGHT])
    async with engine_on(lambda _body: (200, next(answers))) as (engine, _):
        items = ItemStream([([item_of(Rewarded(sevens))], 1.0)], seed=0)
        producer = GroupProducer(settings, items, engine, client)
        await producer.produce(PLAN, 0)
        await producer.produce(PLAN, 0)
    assert producer.counts.kept_share == pytest.approx(2 / 3)
    assert producer.counts.report()["failures"] == {"equal_scores": 1, "refused": 1}
    assert producer.counts.reported["mean_reward"] == 0.75


def test_dropped_and_lost_groups_are_told_apart() -> None:
    counts = GroupCounts()
    counts.batch = 2
    assert counts.kept_share == 1
    for _ in range(3):
        counts.record(SampledGroup(lost=GroupLost(FailureReason.EQUAL_SCORES, "all 1")))
    assert counts.kept_share == pytest.approx(1 / 4)
    told = "0 of 2 groups for this batch"
    assert counts.for_batch == f"{told}, 3 dropped; of the newest, 75 % have equal scores"
    counts.begin_batch()
    for _ in range(64):  # older groups are forgotten
        counts.record(SampledGroup(lost=GroupLost(FailureReason.UNAVAILABLE, "no server")))
    assert counts.kept_share == 1
    assert counts.for_batch == f"{told}, 0 dropped, 64 lost"
