"""The prompt and the completion of a recorded conversation as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

from grpo_core.rollouts.record import Message, RolloutRecord

ASSISTANT = "assistant"


def split_conversation(record: RolloutRecord) -> tuple[list[Message], list[Message]]:
    """The messages of the prompt, which may show examples of answers, and those from the policy's
    first turn on. Both are empty if the environment sent no messages."""
    messages = record.messages
    spoken = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    turns = max(1, trained_runs(record.mask))
    begin = spoken[-turns:][0] if spoken else len(messages)
    return list(messages[:begin]), list(messages[begin:])


def trained_runs(mask: Sequence[int]) -> int:
    """Number of runs of trained tokens: the policy's turns."""
    return sum(after > before for before, after in pairwise([0, *mask]))


def text_of(messages: Sequence[Message]) -> str:
    """The content of one message; of several, with the role before each."""
    if len(messages) == 1:
        return content_of(messages[0])
    return "\n".join(f"{message['role']}: {content_of(message)}" for message in messages)


def content_of(message: Message) -> str:
    """The text, or JSON of content in parts. Calls of tools follow it."""
    content = message.get("content")
    parts = [content if isinstance(content, str) else json.dumps(content)] if content else []
    if calls := message.get("tool_calls"):
        parts.append(f"tool_calls: {json.dumps(calls)}")
    return "\n".join(parts)


def printable(line: str) -> str:
    """The line for a terminal: what a model or a reward wrote may hold control characters, which
    are shown as their escape sequences."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
