"""What a user's or a model's code raises is a failure of that call alone, and known at once."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest

from grpo_env.rollout.task_code import TaskCode
from grpo_env.tasks.tools import CodeStopped, answer_calls
from tests.support.wait import DEADLINE_S


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
        assert await code.call("reward", ok, "7") == 1.0
        assert await code.call("reward", ok_later, "7") == 1.0


def ok(_answer: str) -> float:
    return 1.0


async def ok_later(_answer: str) -> float:
    await asyncio.sleep(0)
    return 1.0


async def test_a_tool_that_exits_answers_with_its_error() -> None:
    def leave() -> str:
        """Leave."""
        raise SystemExit(3)

    async def leave_later() -> str:
        """Leave."""
        raise SystemExit(4)

    calls = '<tool_call>{"name": "leave"}</tool_call><tool_call>{"name": "leave_later"}</tool_call>'
    answers = await answer_calls(calls, [leave, leave_later])
    assert answers is not None
    assert [answer["content"] for answer in answers] == [
        "error: SystemExit: 3",
        "error: SystemExit: 4",
    ]


async def test_a_tool_may_name_its_arguments_as_it_likes() -> None:
    def derivative(function: str, args: int) -> str:
        """Differentiate."""
        return f"{function} {args}"

    call = '{"name": "derivative", "arguments": {"function": "x^2", "args": 1}}'
    answers = await answer_calls(f"<tool_call>{call}</tool_call>", [derivative])
    assert answers is not None
    assert [answer["content"] for answer in answers] == ["x^2 1"]
