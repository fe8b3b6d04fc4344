"""Rows become prompts with answers, of which the answers alone are learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_env.rollout.chat_template import ChatTemplate, TokenizerUnusable
from grpo_env.tasks import Message, TaskOptions
from grpo_env.tasks.data_files import DataUnusable
from grpo_runs.sft.examples import (
    NOT_LEARNED,
    Example,
    examples_of,
    read_examples,
    tokenised,
)
from tests.unit.env.rollout.test_chat_template import TextTokenizer


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "3+4=", "completion": "7"},
        {"prompt": [user("3+4=")], "completion": [says("7")]},
        {"messages": [user("3+4="), says("7")]},
        {"question": "3+4=", "answer": 7},
        {"prompt": "3+4=", "reward_model": {"ground_truth": ["7"]}},
    ],
    ids=["text", "messages", "conversation", "answer", "verl"],
)
def test_every_form_of_a_row_gives_the_same_example(row: dict[str, Any], tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(row))
    assert read_examples(TaskOptions(data=str(data))) == [Example([user("3+4=")], says("7"))]


def test_each_answer_of_a_conversation_is_learned_after_what_was_said_before() -> None:
    talk = [user("a"), says("b"), user("c"), says("d")]
    both = [Example(talk[:1], says("b")), Example(talk[:3], says("d"))]
    assert examples_of({"messages": talk}) == both
    assert examples_of({"prompt": talk[:3], "completion": "d"}) == both[1:]


def test_calls_of_tools_as_data_sets_keep_them(tmp_path: Path) -> None:
    """An answer may be calls alone, and the schemas one text."""
    schema = {"type": "function", "function": {"name": "f", "parameters": {}}}
    call: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    }
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"messages": [user("a"), call], "tools": json.dumps([schema])}))
    (found,) = read_examples(TaskOptions(data=str(data)))
    assert found.tools == [schema]
    as_object = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert found.answer == call | {"content": "", "tool_calls": [as_object]}
    with pytest.raises(TokenizerUnusable, match="template of the model leaves out calls"):
        tokenised([found], ChatTemplate(TextTokenizer()), 100)


class ThinkingTokenizer(TextTokenizer):
    """Args: field: the one whose thoughts the template shows"""

    def __init__(self, field: str) -> None:
        super().__init__()
        self._field = field

    def apply_chat_template(self, messages: Any, *arguments: Any, **options: Any) -> str:
        shown = [
            {**m, "content": f"<think>{m[self._field]}</think>{m['content']}"}
            if m.get(self._field)
            else m
            for m in messages
        ]
        return super().apply_chat_template(shown, *arguments, **options)


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking", "reasoning", "none"])
def test_a_thought_is_learned_under_the_name_that_the_template_reads(field: str, read: str) -> None:
    talk: list[Any] = [user("3+4="), {**says("7"), field: "3, 4"}, user("?"), says("8")]
    first, second = tokenised(
        examples_of({"messages": talk}), ChatTemplate(ThinkingTokenizer(read)), 100
    )
    thought = b"" if read == "none" else b"<think>3, 4</think>"
    assert bytes(label for label in first.labels if label >= 0) == thought + b"7<end>"
    assert bytes(second.token_ids).startswith(b"<user>3+4=<end><assistant>" + thought + b"7<end>")
    assert [first.lacks_thought, second.lacks_thought] == [read == "none", False]


def test_a_system_message_is_added_and_an_empty_one_removes_it() -> None:
    system: Message = {"role": "system", "content": "be short"}
    (with_it,) = examples_of({"prompt": "a", "completion": "b"}, "be short")
    assert with_it.prompt == [system, user("a")]
    (without,) = examples_of({"messages": [system, user("a"), says("b")]}, "")
    assert without.prompt == [user("a")]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a"}, "no answer to learn; expected the column completion or answer"),
        ({"messages": [user("a")]}, "no answer to learn"),
        ({"prompt": "a", "completion": [user("b")]}, "'completion' is not of the assistant"),
        ({"prompt": "a", "completion": " "}, "'completion' is empty"),
        ({"text": "a"}, "no column for the prompt"),
        ({"messages": [says("b")]}, "no message before the answer of the assistant"),
        ({"prompt": [user("a"), says("7")], "answer": "7"}, "ends with an answer of the assistant"),
        ({"prompt": "a", "completion": "b", "tools": ["f"]}, "'tools' holds no list of JSON"),
    ],
)
def test_a_row_without_an_answer_is_named(
    row: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n' + json.dumps(row))
    with pytest.raises(DataUnusable, match=rf"1 of 2 rows are invalid:\n.* line 2: .*{problem}"):
        read_examples(TaskOptions(data=str(data)))


def test_only_the_tokens_of_the_answer_have_labels_and_long_examples_are_left_out() -> None:
    template = ChatTemplate(TextTokenizer())
    examples = [Example([user("3+4=")], says("7")), Example([user("?" * 50)], says("7"))]
    (one,) = tokenised(examples, template, 40)
    prompt, answer = b"<user>3+4=<end><assistant>", b"7<end>"
    assert bytes(one.token_ids) == prompt + answer
    assert one.labels == [NOT_LEARNED] * len(prompt) + [*answer]
    with pytest.raises(DataUnusable, match="longer than --seq-len 31; the shortest has 32 tokens"):
        tokenised(examples, template, 31)
