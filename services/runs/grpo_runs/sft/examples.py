"""The rows of `--data` as examples: what the model is asked, and the answer that it learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_env.rollout.chat_template import ChatTemplate, TokenizerUnusable
from grpo_env.tasks import Message, Row, TaskOptions
from grpo_env.tasks.data_files import DataUnusable
from grpo_env.tasks.rows import (
    ANSWER,
    COMPLETION,
    TOOLS,
    answer_text,
    as_messages,
    conversation_of,
    is_missing,
    require_no_answer,
    rows_of,
    with_system_prompt,
)
from grpo_env.tasks.tool_calls import THOUGHTS

NOT_LEARNED = -100
"""The label of a token without loss, as PyTorch's `cross_entropy` ignores it."""


@dataclass(frozen=True)
class Example:
    """Args: tools: JSON schemas that the template shows"""

    prompt: Sequence[Message]
    answer: Message
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class TokenisedExample:
    """`labels`: the token ids of the answer, and `NOT_LEARNED` in the prompt. [T] each.
    `lacks_thought`: the template does not show the answer's thought."""

    token_ids: list[int]
    labels: list[int]
    lacks_thought: bool = False


def read_examples(options: TaskOptions) -> list[Example]:
    """The examples of the data, in its order.

    Raises:
        DataUnusable, DatasetsMissing: see `read_records`; or it lists rows without an answer.
    """

    def convert(row: dict[str, Any]) -> Row:
        return {"examples": examples_of(row, options.system_prompt)}

    rows = rows_of(options, "train", convert) or []
    return [example for row in rows for example in row["examples"]]


def examples_of(row: Row, system_prompt: str | None = None) -> list[Example]:
    """One for each answer of the assistant in a conversation, otherwise one.

    Every answer follows the prompt that the model gets in GRPO. So templates need no marks of
    generation, and may show earlier answers in another way.

    Raises:
        ValueError: the row holds no answer, or something else than text.
    """
    column, found = conversation_of(row)
    asked = with_system_prompt(found, system_prompt, column)
    tools = _tools_of(row)
    if row.get(COMPLETION) is not None:
        answers = as_messages(COMPLETION, row[COMPLETION], role="assistant")
        whole = [*asked, *answers]
        return _answers_in(whole, len(asked), tools)
    is_answered = not is_missing(row.get(ANSWER))
    if asked[-1]["role"] == "assistant" and (column == "messages" or not is_answered):
        return _answers_in(asked, 1, tools)
    if not is_answered:
        raise ValueError(
            "no answer to learn; expected the column completion or answer, or messages that end "
            f"with one, found {', '.join(row)}; name the column with --columns completion=COLUMN"
        )
    require_no_answer(column, asked, row)
    answer: Message = {"role": "assistant", "content": answer_text(row[ANSWER])}
    return [Example(asked, answer, tools)]


def _tools_of(row: Row) -> Sequence[Mapping[str, Any]]:
    """Raises `ValueError`."""
    tools = row.get(TOOLS) or ()
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError("the column 'tools' holds no list of JSON schemas")
    return tools


def _answers_in(
    messages: list[Message], first: int, tools: Sequence[Mapping[str, Any]]
) -> list[Example]:
    """Args: first: number of the first message that may be an answer to learn"""
    if messages[-1]["role"] != "assistant":
        raise ValueError("the last message of the column 'completion' is not of the assistant")
    if len(messages) == 1:
        raise ValueError("no message before the answer of the assistant; add the prompt")
    return [
        Example(messages[:number], message, tools)
        for number, message in enumerate(messages)
        if number >= first and message["role"] == "assistant"
    ]


def tokenised(
    examples: Sequence[Example], template: ChatTemplate, seq_len: int
) -> list[TokenisedExample]:
    """Those of at most `seq_len` tokens.

    Raises:
        DataUnusable: all are longer.
        MessagesUnusable: the template cannot render one of them.
        TokenizerUnusable: it leaves out calls of tools.
    """
    found = [_tokenised(example, template) for example in examples]
    fitting = [one for one in found if len(one.token_ids) <= seq_len]
    if not fitting:
        shortest = min(len(one.token_ids) for one in found)
        raise DataUnusable(
            f"every example is longer than --seq-len {seq_len}; the shortest has {shortest} tokens"
        )
    return fitting


def _tokenised(example: Example, template: ChatTemplate) -> TokenisedExample:
    prompt = template.prompt_ids(example.prompt, example.tools)
    answer = template.answer_ids(example.prompt, example.answer, example.tools)
    if example.answer.get("tool_calls"):
        said: Message = {"role": "assistant", "content": example.answer["content"]}
        if answer == template.answer_ids(example.prompt, said, example.tools):
            raise TokenizerUnusable(
                "the chat template of the model leaves out calls of tools, so they cannot be "
                "learned; use another model, or write the calls into the content"
            )
    has_thought = any(example.answer.get(field) for field in THOUGHTS)
    return TokenisedExample(
        prompt + answer,
        [NOT_LEARNED] * len(prompt) + answer,
        has_thought and not template.shows_thought(example.prompt, example.answer),
    )
