"""Tools: calls in messages, their answers, and schemas of functions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grpo_env.tasks import Answer, State, Task, TaskOptions
from grpo_env.tasks.tool_calls import tool_calls
from grpo_env.tasks.tools import ToolUnusable, answer_calls, tool_schemas


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


async def divide(a: float, b: float) -> float:
    """Divide."""
    return a / b


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("{", "the call is not JSON"),
        ("[]", "the call has no name"),
        ('{"name": 3}', "the call has no name"),
        ('{"name": "add", "arguments": [1]}', "the arguments are not an object"),
    ],
)
def test_what_is_no_call_is_named(content: str, error: str) -> None:
    [found] = tool_calls(f"<tool_call>{content}</tool_call>")
    assert found.error == error


async def test_every_call_gets_an_answer_and_errors_are_answers() -> None:
    text = " ".join(
        [
            call("add", a=3, b=4),
            call("divide", a=1, b=0),
            call("subtract", a=1),
            call("add", x=1),
            "<tool_call>{</tool_call>",
        ]
    )
    answers = await answer_calls(text, [add, divide])
    assert answers is not None
    assert [message["content"] for message in answers] == [
        "7",
        "error: division by zero",
        "error: no tool 'subtract'; the tools are add, divide",
        "error: missing a required argument: 'a'",
        "error: the call is not JSON",
    ]
    assert {message["role"] for message in answers} == {"tool"}
    assert await answer_calls("3 and 4 is 7", [add]) is None


def test_the_schema_of_a_function_is_made_of_its_types_and_docstring() -> None:
    [schema, given] = tool_schemas([add, {"type": "function"}])
    assert given == {"type": "function"}
    function = schema["function"]
    assert (function["name"], function["description"]) == ("add", "Add two numbers.")
    assert function["parameters"]["properties"]["a"] == {
        "type": "integer",
        "description": "the first number",
    }
    assert function["parameters"]["required"] == ["a"]


def test_a_function_without_description_is_named() -> None:
    with pytest.raises(ToolUnusable, match=r"divide \(.*test_tools.py line \d+\) has no schema"):
        tool_schemas([divide])


async def test_a_task_with_tools_answers_calls_by_itself() -> None:
    class Sums(Task):
        tools = (add,)

    task = Sums(TaskOptions())
    assert task.is_conversation
    assert await task.step(State({}), Answer(call("add", a=1, b=2))) == [
        {"role": "tool", "name": "add", "content": "3"}
    ]
    assert await task.step(State({}), Answer("3")) is None
