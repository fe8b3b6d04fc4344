"""Rewards of a task: what they may return, and what happens if they fail."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from grpo_env.maths.parts import UnknownRewardPart
from grpo_env.rollout.grader import Grade, Grader, Ungraded
from grpo_env.rollout.groups import FailureReason
from grpo_env.rollout.task_code import TaskCode
from grpo_env.tasks import Answer, Graded
from tests.support.wait import DEADLINE_S
from tests.unit.env.canned import generate_answer
from tests.unit.env.rollout.rig import Rewarded, lost, sample


async def grade(
    value: Any, weights: dict[str, float] | None = None, answer: Answer | None = None
) -> Grade | Ungraded:
    """The grade of a reward that returns this value."""
    return await grade_by(lambda _answer, _row: value, weights, answer)


async def grade_by(
    reward: Any, weights: dict[str, float] | None = None, answer: Answer | None = None
) -> Grade | Ungraded:
    with TaskCode(DEADLINE_S) as code:
        task = Rewarded(reward)
        [found] = await Grader(weights or {}, code).grade_all(task, [answer or Answer("7")], {})
        return found


async def test_the_score_is_the_weighted_sum_of_the_parts() -> None:
    parts = {"accuracy": 1, "format": 0.5}
    assert await grade(0.25) == Grade(0.25, {"reward": 0.25})
    assert await grade(True) == Grade(1.0, {"reward": 1.0})
    assert await grade(parts) == Grade(1.5, parts)
    assert await grade(parts, {"format": 0.2, "accuracy": 2.0}) == Grade(2.1, parts)
    assert await grade(Graded({"a": 1.0}, "why"), {"a": 0.0}) == Grade(0.0, {"a": 1.0}, "why")
    # Half of the tokens that the limit allows; -0.5, with the weight 0.1.
    answer = Answer("7", token_ids=[1, 2], max_tokens=4)
    assert await grade(1.0, {"length": 0.1}, answer) == Grade(0.95, {"reward": 1.0, "length": -0.5})


async def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    for value in (np.float32(1), np.int64(1), np.True_, np.array(1.0), torch.tensor(1)):
        assert await grade(value) == Grade(1.0, {"reward": 1.0})
        assert await grade({"a": value}) == Grade(1.0, {"a": 1.0})
    assert await grade(Graded({}, score=np.float32(0.5))) == Grade(0.5, {})  # type: ignore[arg-type]


async def test_a_part_that_is_none_is_left_out_and_known() -> None:
    with TaskCode(DEADLINE_S) as code:
        grader = Grader({"b": 2.0}, code)
        answers = [Answer("7")] * 64
        grades = await grader.grade_all(Rewarded(lambda *_: {"a": 1.0, "b": None}), answers, {})
    assert grades[0] == Grade(1.0, {"a": 1.0})


async def test_a_coroutine_is_awaited_outside_of_the_event_loop() -> None:
    async def reward(_answer: str, _row: Any) -> float:
        assert threading.current_thread() is not threading.main_thread()
        return 0.5

    assert await grade_by(reward) == Grade(0.5, {"reward": 0.5})


async def test_coroutines_of_a_task_that_does_not_block_wait_side_by_side() -> None:
    both = asyncio.Barrier(2)

    class Waiting(Rewarded):
        async def reward(self, answer: Any, row: Any) -> float:  # noqa: ARG002
            await both.wait()
            return 1.0

    with TaskCode(DEADLINE_S) as code:
        task = Waiting(None, blocks=False)  # type: ignore[arg-type]
        found = await Grader({}, code).grade_all(task, [Answer("7"), Answer("8")], {})
    assert found == [Grade(1.0, {"reward": 1.0})] * 2


async def test_code_that_has_not_ended_is_cancelled_at_the_end() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with TaskCode(DEADLINE_S) as code:
        call = asyncio.ensure_future(code.call("the reward", endless))
        await asyncio.to_thread(begun.wait)
    await asyncio.to_thread(ended.wait)
    with pytest.raises(RuntimeError, match="cancelled itself"):
        await call


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (float("nan"), "the reward is nan, which is not finite in float32"),
        (
            {"a": 1.0, "b": float("inf")},
            "the part 'b' of the reward is inf, which is not finite in float32",
        ),
        (10**400, "the reward is inf, which is not finite in float32"),
        (1e39, "the reward is 1e+39, which is not finite in float32"),
        ("7", "the reward is '7', a str; expected a number, or a dict of named numbers"),
        (None, "the reward is None; a part may be None, or one of several rewards, but not all"),
        (
            np.zeros(1),
            "the reward is array([0.]), a ndarray; expected a number, or a dict of named numbers",
        ),
        (Graded({"a": 1.0}, score=math.nan), "the reward is nan, which is not finite in float32"),
        ({}, "the reward is empty; expected a number, or a dict of named numbers"),
    ],
)
async def test_what_is_no_number_is_never_a_score(value: Any, problem: str) -> None:
    assert await grade(value) == Ungraded(f"RewardInvalid: {problem}")


async def test_a_part_may_be_missing_in_some_answers_but_not_in_all() -> None:
    def reward(answer: Answer, _row: Any) -> dict[str, float]:
        return {"accuracy": 1.0} | ({"format": 0.5} if answer == "b" else {})

    with TaskCode(DEADLINE_S) as code:
        grader = Grader({"format": 2.0}, code)
        answers = [Answer(text) for text in 40 * ("a", "b")]
        grades = await grader.grade_all(Rewarded(reward), answers, {})
        assert [grade.score for grade in grades[:2] if isinstance(grade, Grade)] == [1.0, 2.0]
        typed_wrong = Grader({"acuracy": 1.0}, code)
        with pytest.raises(UnknownRewardPart, match=r"acuracy; the parts .* accuracy, format"):
            await typed_wrong.grade_all(Rewarded(reward), answers, {})


async def test_an_error_of_the_reward_that_looks_like_a_stop_is_an_error() -> None:
    def times_out(_answer: Answer, _row: Any) -> float:
        raise TimeoutError("the judge")

    async def cancels(_answer: Answer, _row: Any) -> float:
        raise asyncio.CancelledError

    assert await grade_by(times_out) == Ungraded("TimeoutError: the judge")
    found = await grade_by(cancels)
    assert isinstance(found, Ungraded)


async def test_an_exception_quarantines_the_group_and_is_shown_once() -> None:
    def reward(answer: Answer, _row: Any) -> float:
        if answer == "8":
            raise KeyError("solution")
        return 1.0

    with capture_logs() as logs:
        outcome, _ = await sample(
            lambda _body: (200, generate_answer(["7", "8"])), Rewarded(reward)
        )
        for _ in range(3):
            assert isinstance(await grade_by(reward, answer=Answer("7")), Grade)

    assert lost(outcome).reason is FailureReason.QUARANTINED_REWARD
    assert lost(outcome).detail == "completion 1: KeyError: 'solution'"
    assert [g.score for g in outcome.grades] == [1.0]
    [shown] = [line for line in logs if line["event"] == "reward.failed"]
    assert 'raise KeyError("solution")' in shown["traceback"]


async def test_rewards_of_a_group_run_side_by_side_and_hold_up_no_other_group() -> None:
    together = threading.Barrier(3, timeout=DEADLINE_S)  # two answers, and this test

    def slow(_answer: Answer, _row: Any) -> float:
        together.wait()
        return 1.0

    with TaskCode(DEADLINE_S) as code:
        grader = Grader({}, code)
        waiting = asyncio.create_task(
            grader.grade_all(Rewarded(slow), [Answer("a"), Answer("b")], {})
        )
        [quick] = await grader.grade_all(Rewarded(lambda _a, _r: 0.5), [Answer("c")], {})
        assert quick == Grade(0.5, {"reward": 0.5})
        assert not waiting.done()
        await asyncio.to_thread(together.wait)
        assert await waiting == [Grade(1.0, {"reward": 1.0})] * 2


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_reward_that_never_ends_is_given_up(is_async: bool) -> None:
    never = threading.Event()

    async def hang(_answer: Answer, _row: Any) -> float:
        await asyncio.sleep(DEADLINE_S)
        return 0.0

    def block(_answer: Answer, _row: Any) -> float:
        never.wait(DEADLINE_S)
        return 0.0

    with TaskCode(deadline_s=0.05) as code:
        task = Rewarded(hang if is_async else block)
        [found] = await Grader({}, code).grade_all(task, [Answer("7")], {})
        never.set()
    assert isinstance(found, Ungraded)
    assert "did not end within 0.05 s" in found.problem
