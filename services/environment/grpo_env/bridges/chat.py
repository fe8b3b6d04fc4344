"""Answers requests of OpenAI's chat completions API within one rollout.

Messages, tools and tool calls have the form of that API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_env.tasks import Answer, ContextFull, Dialogue, Message
from grpo_env.tasks.tool_calls import divided_by_calls, text_parameters

ChatMessage = Mapping[str, Any]
"""A message of the chat completions API."""


class ImagesUnsupported(ValueError):
    """A message holds something other than text."""


@dataclass(frozen=True)
class ChatAnswer:
    """What the policy said.

    content: its text without tool calls; None if there is only a tool call.
    tool_calls: in the order of the text.
    finish_reason: `stop`, `length` or `tool_calls`.
    completion_tokens: number of tokens that were sampled for this answer.
    """

    content: str | None
    tool_calls: list[dict[str, Any]]
    finish_reason: str
    completion_tokens: int


class Chat:
    """One rollout. It remembers the exact text of every answer with tool calls, so that the
    conversation continues token by token although the environment sends the calls back parsed."""

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue = dialogue
        self._texts: dict[str, tuple[ChatMessage, str]] = {}
        self._sampled_tokens = 0
        self._calls = 0
        self._full: ContextFull | None = None

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        sampling: Mapping[str, Any] | None = None,
    ) -> ChatAnswer:
        """Let the policy answer.

        Args:
            sampling: `max_tokens` (or `max_completion_tokens`) and `stop` count; the run's options
                set everything else.

        Raises:
            ContextFull: the conversation has no room for another token.
            ImagesUnsupported: a message holds an image or a sound.
        """
        options = sampling or {}
        try:
            answer = await self._dialogue.say(
                [self._as_said(message) for message in messages],
                tools=tools,
                max_tokens=options.get("max_completion_tokens") or options.get("max_tokens"),
                stop=_texts_of(options.get("stop")),
            )
        except ContextFull as error:
            self._full = error
            raise
        new_tokens = len(answer.token_ids) - self._sampled_tokens
        self._sampled_tokens = len(answer.token_ids)
        content, calls = self._parsed(answer, tools) if tools else (str(answer), [])
        if calls:
            said = {"role": "assistant", "content": content, "tool_calls": calls}
            self._texts[calls[0]["id"]] = (plain_message(said), str(answer))
        reason = "length" if not answer.finished else "tool_calls" if calls else "stop"
        return ChatAnswer(content, calls, reason, new_tokens)

    def raise_if_silent(self) -> None:
        """Raises `ContextFull` if the prompt alone was too long: the policy said nothing."""
        if self._full is not None and not self._sampled_tokens:
            raise self._full

    def _as_said(self, message: ChatMessage) -> Message:
        plain = plain_message(message)
        for call in message.get("tool_calls") or ():
            parsed, text = self._texts.get(call["id"], (None, ""))
            if parsed == plain:
                return {"role": "assistant", "content": text}
        return plain

    def _parsed(
        self, answer: Answer, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str | None, list[dict[str, Any]]]:
        """As vLLM's parsers: if one call is no JSON or has no name, the whole text is content."""
        content, calls = divided_by_calls(answer, text_parameters(tools))
        if not calls or not all(call.name for call in calls):
            return str(answer), []
        listed = []
        for call in calls:
            self._calls += 1
            arguments = call.written if call.error else dict(call.arguments)
            function = {"name": call.name, "arguments": json.dumps(arguments)}
            listed.append({"id": f"call_{self._calls}", "type": "function", "function": function})
        return content.strip() or None, listed


def plain_message(message: ChatMessage) -> Message:
    """A message for the chat template, with its content as text and without empty fields.

    Raises:
        ImagesUnsupported: the message holds an image or a sound.
    """
    plain: dict[str, Any] = {"role": message["role"], "content": _text_of(message)}
    if name := message.get("name"):
        plain["name"] = name
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_template_call(call) for call in calls]
    return plain  # type: ignore[return-value]


def _text_of(message: ChatMessage) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        kind = part.get("type")
        if kind != "text":
            raise ImagesUnsupported(
                f"a message of the role {message['role']} holds a part of the type {kind!r}; only "
                "text is supported, because images cannot be trained on yet"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Chat templates expect the arguments as an object, the API sends them as JSON. verifiers' own
    form of a call has name and arguments at the top."""
    function = call.get("function") or call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = function["arguments"]
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _texts_of(stop: Any) -> Sequence[str]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())
