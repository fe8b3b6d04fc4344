"""Rewards of a task: what they may return, penalties worked out by hand, and what happens if the
code fails."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from grpo_env.rollout.grader import (
    PENALTIES,
    Grade,
    Grader,
    Ungraded,
    UnknownRewardPart,
    length,
    overlong,
    repetition,
)
from grpo_env.rollout.groups import FailureReason
from grpo_env.rollout.task_code import TaskCode
from grpo_env.tasks import Answer, Graded, Task
from grpo_env.tasks.tools import CodeStopped, user_loop
from tests.support.canned import generate_answer
from tests.support.wait import DEADLINE_S, wait_for_async
from tests.unit.env.feeding import Rewarded
from tests.unit.env.rollout.rig import item_of, lost, sample


async def grade(
    value: Any, weights: dict[str, float] | None = None, answer: Answer | None = None
) -> Grade | Ungraded:
    """The grade of a reward that returns this value."""
    return await grade_by(lambda _answer, _row: value, weights, answer)


async def grade_by(
    reward: Any, weights: dict[str, float] | None = None, answer: Answer | None = None
) -> Grade | Ungraded:
    [found] = await grades(Rewarded(reward), [answer or Answer("7")], weights)
    return found


async def grades(
    task: Task,
    answers: list[Answer],
    weights: dict[str, float] | None = None,
    deadline_s: float = DEADLINE_S,
) -> list[Grade | Ungraded]:
    with TaskCode(deadline_s) as code:
        return await Grader(weights or {}, code).grade_all(item_of(task), answers)


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


async def test_a_metric_is_logged_and_never_counts() -> None:
    graded = Graded({"a": 0.5}, metrics={"exact": 7.0})
    assert await grade(graded) == Grade(0.5, {"exact": 7.0, "a": 0.5})


async def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    for value in (np.float32(1), np.int64(1), np.True_, np.array(1.0), torch.tensor(1)):
        assert await grade(value) == Grade(1.0, {"reward": 1.0})
        assert await grade({"a": value}) == Grade(1.0, {"a": 1.0})
    assert await grade(Graded({}, score=np.float32(0.5))) == Grade(0.5, {})  # type: ignore[arg-type]


async def test_a_part_that_is_none_is_left_out_and_known() -> None:
    task = Rewarded(lambda *_: {"a": 1.0, "b": None})
    assert (await grades(task, [Answer("7")] * 64, {"b": 2.0}))[0] == Grade(1.0, {"a": 1.0})


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

    task = Waiting(None, blocks=False)  # type: ignore[arg-type]
    found = await grades(task, [Answer("7"), Answer("8")])
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


NOT_FINITE = ", which is not finite in float32"
EXPECTED = "; expected a number, or named numbers"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (float("nan"), f"the reward is nan{NOT_FINITE}"),
        ({"a": 1.0, "b": float("inf")}, f"the part 'b' of the reward is inf{NOT_FINITE}"),
        (10**400, f"the reward is inf{NOT_FINITE}"),
        (1e39, f"the reward is 1e+39{NOT_FINITE}"),
        ("7", f"the reward is '7', a str{EXPECTED}"),
        (None, "the reward is None; a part may be None, or one of several rewards, but not all"),
        (np.zeros(1), f"the reward is array([0.]), a ndarray{EXPECTED}"),
        (Graded({"a": 1.0}, score=math.nan), f"the reward is nan{NOT_FINITE}"),
        ({}, f"the reward is empty{EXPECTED}"),
    ],
)
async def test_what_is_no_number_is_never_a_score(value: Any, problem: str) -> None:
    assert await grade(value) == Ungraded(f"RewardInvalid: {problem}")


async def test_a_part_may_be_missing_in_some_answers_but_not_in_all() -> None:
    def reward(answer: Answer, _row: Any) -> dict[str, float]:
        return {"accuracy": 1.0} | ({"format": 0.5} if answer == "b" else {})

    answers = [Answer(text) for text in 40 * ("a", "b")]
    found = await grades(Rewarded(reward), answers, {"format": 2.0})
    assert [grade.score for grade in found[:2] if isinstance(grade, Grade)] == [1.0, 2.0]
    with pytest.raises(UnknownRewardPart, match=r"acuracy; there are accuracy, format"):
        await grades(Rewarded(reward), answers, {"acuracy": 1.0})


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
    assert lost(outcome).detail == "training row 1: completion 1: KeyError: 'solution'"
    assert [g.score for g in outcome.grades] == [1.0]
    [shown] = [line for line in logs if line["event"] == "reward.failed"]
    assert shown["row"] == "training row 1"
    assert shown["at"].startswith(f"{__file__}:")
    assert shown["at"].endswith(': raise KeyError("solution")')
    assert "/grpo_env/" not in shown["exception"]


async def test_rewards_of_a_group_run_side_by_side_and_hold_up_no_other_group() -> None:
    together = threading.Barrier(3, timeout=DEADLINE_S)  # two answers, and this test

    def slow(_answer: Answer, _row: Any) -> float:
        together.wait()
        return 1.0

    with TaskCode(DEADLINE_S) as code:
        grader = Grader({}, code)
        waiting = asyncio.create_task(
            grader.grade_all(item_of(Rewarded(slow)), [Answer("a"), Answer("b")])
        )
        other = item_of(Rewarded(lambda _a, _r: 0.5))
        [quick] = await grader.grade_all(other, [Answer("c")])
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

    task = Rewarded(hang if is_async else block)
    [found] = await grades(task, [Answer("7")], deadline_s=0.05)
    never.set()
    assert isinstance(found, Ungraded)
    assert "did not end within 0.05 s" in found.problem


def no_number(_answer: str) -> float:
    return float(next(iter(())))


def exits(_answer: str) -> float:
    exec("exit()", {"exit": sys.exit})
    return 1.0


def interrupts(_answer: str) -> float:
    raise KeyboardInterrupt


async def exits_later(_answer: str) -> float:
    await asyncio.sleep(0)
    return exits(_answer)


FUNCTIONS: dict[Callable[..., Any], str] = {
    no_number: "StopIteration",
    exits: "SystemExit",
    interrupts: "KeyboardInterrupt",
    exits_later: "SystemExit",
}


@pytest.mark.parametrize("function", FUNCTIONS)
async def test_what_no_future_holds_and_what_ends_a_process_is_an_error_of_the_call(
    function: Callable[..., Any],
) -> None:
    with TaskCode(10 * DEADLINE_S) as code:  # a call that never ends would end the test first
        with pytest.raises(CodeStopped, match=FUNCTIONS[function]):
            await code.call("reward", function, "7")
        assert await code.call("reward", str, 7) == "7"
        assert await code.call("reward", asyncio.sleep, 0, "7") == "7"


async def test_its_threads_end_with_it() -> None:
    user_loop()  # whose thread stays for the next one
    before = set(threading.enumerate())
    with TaskCode(DEADLINE_S) as code:
        assert await code.call("reward", str, 7) == "7"
        assert await code.call("reward", asyncio.sleep, 0, "7") == "7"
        assert len(set(threading.enumerate()) - before) > 2
    await wait_for_async(lambda: set(threading.enumerate()) <= before)


def said(tokens: int, max_tokens: int = 100, text: str = "", finished: bool = True) -> Answer:
    return Answer(text, token_ids=range(tokens), max_tokens=max_tokens, finished=finished)


@pytest.mark.parametrize(
    ("tokens", "of_length", "of_overlong"),
    # Limit 100, buffer 20: the penalty for an overlong answer starts at 80 tokens.
    [
        *((0, 0.0, 0.0), (1, -0.01, 0.0), (80, -0.8, 0.0), (81, -0.81, -0.05)),
        *((90, -0.9, -0.5), (100, -1.0, -1.0), (150, -1.0, -1.0)),
    ],
)
def test_length_is_the_used_share_of_the_limit_and_overlong_falls_in_its_last_fifth(
    tokens: int, of_length: float, of_overlong: float
) -> None:
    assert length(said(tokens)) == pytest.approx(of_length)
    assert overlong(said(tokens)) == pytest.approx(of_overlong)
    assert overlong(said(tokens, finished=False)) == -1.0


@pytest.mark.parametrize(
    ("text", "penalty"),
    [
        *(("", 0.0), ("one two three", 0.0), ("one two three four five", 0.0)),
        # Words: a b c d a b c d. 4-grams: abcd bcda cdab dabc abcd, so 4 of 5 differ.
        ("a b c d\na B  c d", -0.2),
        # 13 words have 10 4-grams, which are all the same.
        ("no " * 13, -0.9),
    ],
)
def test_repetition_is_the_share_of_repeated_ngrams(text: str, penalty: float) -> None:
    assert repetition(Answer(text)) == pytest.approx(penalty)


def test_penalties_are_no_rewards_and_handle_100_kb() -> None:
    for penalty in PENALTIES.values():
        assert -1.0 <= penalty(said(100, text="no " * 33_000)) < -0.9
        assert penalty(said(0)) == 0.0
