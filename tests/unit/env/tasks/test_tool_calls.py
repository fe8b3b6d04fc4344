"""Calls of tools in a message, in the forms of several families of models, and their answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grpo_env.tasks import Answer, State, Task, TaskOptions
from grpo_env.tasks.tool_calls import (
    CallFormat,
    ToolCall,
    divided_by_calls,
    format_of,
    text_parameters,
    tool_calls,
)
from grpo_env.tasks.tools import ToolUnusable, answer_calls, tool_schemas

ADD = ToolCall("add", {"a": 1})
IN_TAGS = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'

ONE_CALL = {
    "JSON in tags": f"I add. {IN_TAGS}",
    "arguments as a text": r'<tool_call>{"name": "add", "arguments": "{\"a\": 1}"}</tool_call>',
    "a list": '<tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>',
    "a code fence": '<tool_call>\n```json\n{"name": "add", "arguments": {"a": 1}}\n```</tool_call>',
    "Qwen3-Coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
    "</tool_call>",
    "Llama 3.1": '{"name": "add", "parameters": {"a": 1}}',
    "Llama 3.1 with a tag": ' <|python_tag|>{"name": "add", "parameters": {"a": 1}}',
    "Mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]',
    "Mistral without its special token": '[{"name": "add", "arguments": {"a": 1}}]',
    "Mistral Small 3": '[TOOL_CALLS]add[ARGS]{"a": 1}',
    "after a thought": f"<think>{IN_TAGS.replace('1', '2')}</think>\n{IN_TAGS}",
    "after a thought that the prompt began": f"{IN_TAGS.replace('1', '2')}</think>\n{IN_TAGS}",
}


TWO_CALLS = {
    "in one block": '<tool_call>{"name": "add", "arguments": {"a": 1}}\n'
    '{"name": "add", "arguments": {"a": 1}}</tool_call>',
    "in two blocks": IN_TAGS + IN_TAGS,
    "Llama 3.1": '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}',
    "Mistral Small 3": '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add{"a": 1}',
}


NO_CALLS = {
    "a draft": f"<think>I may write {IN_TAGS}.</think> It is 7.",
    "a thought that does not end": f"<think>I may write {IN_TAGS}",
    "JSON as an answer": '{"name": "Ada", "born": 1815}',
    "text": "3 + 4 is 7",
}


CALLS = [NO_CALLS, ONE_CALL, TWO_CALLS]


@pytest.mark.parametrize(
    ("count", "text"),
    [(count, text) for count, texts in enumerate(CALLS) for text in texts.values()],
    ids=[name for texts in CALLS for name in texts],
)
def test_every_form_is_read_and_what_is_no_call_is_not_run(count: int, text: str) -> None:
    before, calls = divided_by_calls(text)
    assert calls == [ADD] * count
    assert (before == text) is (count == 0)


def test_a_thought_that_the_prompt_began_and_that_does_not_end_holds_drafts() -> None:
    assert tool_calls(Answer(IN_TAGS, opening="<think>\n")) == []
    assert tool_calls(Answer(f"so</think>{IN_TAGS}", opening="<think>\n")) == [ADD]


def test_only_the_form_of_the_family_counts() -> None:
    bare = ONE_CALL["Llama 3.1"]
    assert tool_calls(Answer(bare, call_format=CallFormat.TAGS)) == []
    assert tool_calls(Answer(IN_TAGS, call_format=CallFormat.LLAMA3)) == []
    assert tool_calls(Answer(bare, call_format=CallFormat.LLAMA3)) == [ADD]


def test_a_mark_or_a_line_break_in_a_text_is_part_of_it() -> None:
    text = 'So: <tool_call>{"name": "f", "arguments": {"x": "</tool_call>\n"}}</tool_call>'
    assert divided_by_calls(text) == ("So: ", [ToolCall("f", {"x": "</tool_call>\n"})])


def test_parameters_in_xml_are_texts_as_the_schema_says() -> None:
    schema = {"name": "f", "parameters": {"properties": {"x": {"type": "string"}, "y": {}}}}
    text = "<tool_call><function=f><parameter=x>\n1\n</parameter><parameter=y>\n1\n</parameter>"
    for given in (schema, {"type": "function", "function": schema}):
        assert tool_calls(text, text_parameters([given])) == [ToolCall("f", {"x": "1", "y": 1})]


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        *(
            (OPTIONAL, "1.50", "1.50"),
            (OPTIONAL, "null", None),
            ({"type": "string"}, "null", "null"),
        ),
        *(({"type": ["string", "null"]}, "true", "true"), ({"type": ["integer", "null"]}, "1", 1)),
        *(({"$ref": "#/$defs/Hash"}, "1e5", "1e5"), ({"$ref": "#/$defs/Size"}, "1", 1)),
        *(({"oneOf": [{"type": "integer"}, {"$ref": "#/$defs/Hash"}]}, "7", "7"), ({}, "7", 7)),
        *(({"enum": ["1", "2"]}, "1", "1"), ({"enum": [1, 2]}, "1", 1), ({"const": "1"}, "1", "1")),
        *(({"enum": ["1", None]}, "null", None), ({"allOf": [OPTIONAL]}, "7", "7")),
        *(({"type": "string", "nullable": True}, "null", None), ({"$ref": "x#/y"}, "1", 1)),
        *(({"$ref": "#/properties/y/anyOf/0"}, "7", "7"), ({"$ref": "#/$defs/Any"}, "7", 7)),
        *(({"$ref": "#/properties/y/anyOf/2"}, "7", 7), ({"$ref": "#/$defs/Tree"}, "7", "7")),
    ],
)
def test_a_text_stays_a_text_wherever_the_schema_allows_one(
    schema: dict[str, Any], written: str, value: Any
) -> None:
    tree = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Tree"}]}
    definitions = {"Hash": OPTIONAL, "Size": {"minimum": 0}, "Any": True, "Tree": tree}
    parameters = {"properties": {"x": schema, "y": OPTIONAL}, "$defs": definitions}
    is_text = text_parameters([{"name": "f", "parameters": parameters}])
    text = f"<tool_call><function=f><parameter=x>\n{written}\n</parameter></function></tool_call>"
    assert tool_calls(text, is_text) == [ToolCall("f", {"x": value})]


def test_a_message_full_of_broken_calls_ends() -> None:
    assert len(tool_calls("<tool_call>[</tool_call>" * 10_000)) == 64


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ('<tool_call>{"name": <name>, "arguments": <args>}</tool_call>', CallFormat.TAGS),
        ("<tool_call><function=example><parameter=x>", CallFormat.TAGS),
        ("<tool_call>{name}<arg_key>{key}</arg_key>, as arguments", None),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", CallFormat.MISTRAL),
        ("<|start_header_id|> parameters", CallFormat.LLAMA3),
        ("<|tool_call_start|>[f(x=1)]<|tool_call_end|>", None),
        ("no mark: the model was taught by examples", CallFormat.TAGS),
    ],
)
def test_the_form_is_found_from_the_template(template: str, form: CallFormat | None) -> None:
    assert format_of(template) is form


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
        *(("{", "the call is not JSON"), ("[]", "the call has no name")),
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
    answers = await answer_calls(text, [add, divide]) or []
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
    with pytest.raises(ToolUnusable, match=r"divide \(.*tool_calls.py line \d+\) has no schema"):
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


async def test_a_tool_that_exits_answers_with_its_error_and_names_arguments_as_it_likes() -> None:
    def leave() -> str:
        raise SystemExit(3)

    async def leave_later() -> str:
        raise SystemExit(4)

    def derivative(function: str, args: int) -> str:
        return f"{function} {args}"

    calls = [call("leave"), call("leave_later"), call("derivative", function="x^2", args=1)]
    answers = await answer_calls("".join(calls), [leave, leave_later, derivative])
    contents = [answer["content"] for answer in answers or ()]
    assert contents == ["error: SystemExit: 3", "error: SystemExit: 4", "x^2 1"]
