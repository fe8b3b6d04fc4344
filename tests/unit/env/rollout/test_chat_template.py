"""Prompts are rendered once, and may begin the answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo_env.rollout.chat_template import (
    _PLACEHOLDER,
    ChatTemplate,
    TokenizerUnusable,
    answered,
    load_template,
)
from grpo_env.tasks import Message

QUESTION: list[Message] = [{"role": "user", "content": "3+4="}]


class TextTokenizer:
    """A template with marks, whose tokens are bytes.

    Args: opening: what it writes of every answer; chat_template: its text; shows: roles and `tools`
    that it shows
    """

    def __init__(self, opening: str = "", chat_template: str = "", shows: str = "") -> None:
        self.chat_template = chat_template
        self._opening = opening
        self._shows = {"user", "assistant", *shows.split()}
        self.rendered = 0

    def apply_chat_template(
        self,
        messages: Any,
        tools: Any = None,
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        enable_thinking: bool = True,
    ) -> str:
        assert not tokenize
        self.rendered += 1
        shown = [message for message in messages if message["role"] in self._shows]
        listed = str(tools) if tools and "tools" in self._shows else ""
        said = "".join(f"<{m['role']}>{m['content']}<end>" for m in shown)
        empty = "" if enable_thinking else "<think>\n\n</think>\n"
        asks = f"<assistant>{self._opening}{empty}" if add_generation_prompt else ""
        return f"{listed}{said}{asks}"

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())


def test_equal_prompts_are_rendered_once_and_nobody_changes_what_is_kept() -> None:
    tokenizer = TextTokenizer(shows="tools")
    template = ChatTemplate(tokenizer)
    first = template.prompt_ids(QUESTION)
    first.append(0)
    assert bytes(template.prompt_ids([*QUESTION])) == b"<user>3+4=<end><assistant>"
    assert bytes(template.prompt_ids(QUESTION, [{"name": "f"}])).startswith(
        b"[{'name': 'f'}]<user>"
    )
    assert tokenizer.rendered == 2


@pytest.mark.parametrize(
    ("written", "begun", "prompt", "opening"),
    [
        ("", None, "<user>3+4=<end><assistant>", ""),
        ("<think>\n", None, "<user>3+4=<end><assistant><think>\n", "<think>\n"),
        ("", "<think>\nSo", "<user>3+4=<end><assistant><think>\nSo", "<think>\nSo"),
        ("<think>\n", "<think>\nSo", "<user>3+4=<end><assistant><think>\nSo", "<think>\nSo"),
        ("<think>\n", "So", "<user>3+4=<end><assistant><think>\nSo", "<think>\nSo"),
    ],
)
def test_a_last_message_of_the_assistant_is_continued(
    written: str, begun: str | None, prompt: str, opening: str
) -> None:
    template = ChatTemplate(TextTokenizer(written))
    messages: Any = [*QUESTION, *([{"role": "assistant", "content": begun}] if begun else [])]
    assert bytes(template.prompt_ids(messages)).decode() == prompt
    assert template.opening(messages) == opening
    assert template.opening("a text without template") == ""
    assert answered(messages, "7") == [
        *QUESTION,
        {"role": "assistant", "content": f"{begun or ''}7"},
    ]


@pytest.mark.parametrize(
    ("template", "shows", "problem"),
    [
        ("<tool_call>arguments", "tools tool", None),
        ("<tool_call>arguments", "tool", "does not show its tools "),
        ("<tool_call>arguments", "tools", "does not show the answers of its tools "),
        ("", "", "does not show its tools and the answers of its tools "),
        ("<arg_key>", "tools tool", "in a form that is not read here"),
    ],
)
@pytest.mark.parametrize("name", ["adds_two", "user"])
def test_a_template_that_hides_tools_is_refused(
    template: str, shows: str, problem: str | None, name: str
) -> None:
    checked = ChatTemplate(TextTokenizer(chat_template=template, shows=shows))
    schema = {"type": "function", "function": {"name": name}}
    if problem is None:
        checked.require_tools("sums", schema)
        return
    with pytest.raises(TokenizerUnusable, match=rf"{problem}.*chat_template\.jinja"):
        checked.require_tools("sums", schema)


def test_a_message_that_holds_the_placeholder_is_shown_whole() -> None:
    template = ChatTemplate(TextTokenizer(shows="tool"))
    message: Message = {"role": "tool", "content": f"4{_PLACEHOLDER}5"}
    shown = bytes(template.turn_ids([message], last_id=-1)).decode()
    assert shown == f"<end><tool>4{_PLACEHOLDER}5<end><assistant>"


def test_arguments_of_the_template_reach_it() -> None:
    template = ChatTemplate(TextTokenizer(), {"enable_thinking": False})
    assert bytes(template.prompt_ids(QUESTION)).endswith(b"<think>\n\n</think>\n")
    assert template.opening(QUESTION) == "<think>\n\n</think>\n"


def test_a_tokenizer_without_a_chat_template_is_refused(
    tokenizer_dir: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tokenizer_dir, bare, ignore=shutil.ignore_patterns("chat_template*"))

    with pytest.raises(TokenizerUnusable, match="no chat template"):
        load_template(str(bare))


def test_the_rules_of_tokenizer_json_hold_whatever_class_its_model_names(
    tokenizer_dir: Path, tmp_path: Path
) -> None:
    named = tmp_path / "named"
    shutil.copytree(tokenizer_dir, named)
    file = named / "tokenizer_config.json"
    words = json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}
    file.write_text(json.dumps(words))
    text = "3 + 4 =\n\n what"
    template = load_template(str(named))
    assert template.tokenizer.decode(template.prompt_ids(text)) == text
    saved = json.loads((named / "tokenizer.json").read_text())
    padding = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}  # as after training on batches
    (named / "tokenizer.json").write_text(json.dumps(saved | {"padding": padding}))
    assert template.prompt_ids(text) == load_template(str(named)).prompt_ids(text)
    file.write_text(json.dumps(words | {"extra_special_tokens": ["answer"]}))
    with pytest.raises(TokenizerUnusable, match="but transformers makes "):
        load_template(str(named))
    (named / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerUnusable, match="no tokenizer at"):
        load_template(str(named))


def test_an_answer_to_learn_follows_the_prompt_and_ends_as_the_template_ends_it() -> None:
    template = ChatTemplate(TextTokenizer())
    answer: Message = {"role": "assistant", "content": "7"}
    assert bytes(template.answer_ids(QUESTION, answer)) == b"7<end>"
    begun: list[Message] = [*QUESTION, {"role": "assistant", "content": "It is "}]
    assert bytes(template.prompt_ids(begun)) == b"<user>3+4=<end><assistant>It is "
    assert bytes(template.answer_ids(begun, answer)) == b"7<end>"


def test_an_answer_that_the_template_shows_behind_another_beginning_is_refused() -> None:
    template = ChatTemplate(TextTokenizer(opening="<think>\n"))
    thought: Message = {"role": "assistant", "content": "<think>\nhm</think>7"}
    assert bytes(template.answer_ids(QUESTION, thought)) == b"hm</think>7<end>"
    with pytest.raises(TokenizerUnusable, match=r"ends the prompt with '<think>\\n', and shows '7"):
        template.answer_ids(QUESTION, {"role": "assistant", "content": "7"})
