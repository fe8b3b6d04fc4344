"""Lets a client of the endpoint talk with the policy in one rollout, and keeps its answers as they
were sampled.

Messages, tools and tool calls have the form of the chat completions API.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from grpo_env.tasks import Answer, ContextFull, Dialogue, Message
from grpo_env.tasks.tool_calls import THOUGHTS, IsText, divided_by_calls, text_parameters

MODEL = "policy"
ChatMessage = Mapping[str, Any]
"""A message of the chat completions API."""
_TEXTS = ("text", "input_text", "output_text")
"""Types of the parts of a message that hold a text. The last two are of the responses API."""


class RequestUnusable(Exception):
    """A request asks for something that a rollout cannot have, or has not the API's form."""


class LimitReached(Exception):
    """The rollout has no call or no token left."""


@contextmanager
def reading() -> Iterator[None]:
    """Raises `RequestUnusable` where a request lacks a field, or has one of another type."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RequestUnusable(
            f"the request has not the form of the API: {type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True)
class ChatAnswer:
    """What the policy said.

    content: its text without tool calls; None if there is only a tool call.
    tool_calls: in the order of the text.
    finish_reason: `stop`, `length` or `tool_calls`.
    prompt_tokens, completion_tokens: number of tokens before this answer, and of it.
    """

    content: str | None
    tool_calls: list[dict[str, Any]]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int

    @property
    def message(self) -> dict[str, Any]:
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": "assistant", "content": self.content, **calls}


class Chat:
    """One rollout. It remembers the exact text of every answer with tool calls, so that the
    conversation continues token by token although the environment sends the calls back parsed.

    failed: the first error of its dialogue that the endpoint answered with a refusal.
    on_failure: is called at the first one and all others.
    last: the newest answer of the policy; None before the first one.
    is_cut_off: a call was refused because of a limit, and none was answered that began later.
    stored: conversations that the client continues by the id of an answer, in the form of its API.

    Args: calls, tokens: limits of the rollout; None: no limit
    """

    def __init__(
        self, dialogue: Dialogue, calls: int | None = None, tokens: int | None = None
    ) -> None:
        self._dialogue = dialogue
        self._most_calls, self._most_tokens = calls, tokens
        self._texts: dict[str, tuple[ChatMessage, str]] = {}
        self._tool_calls = 0
        self._calls = 0
        self._tokens = 0
        self._is_closed = False
        self._answering: set[asyncio.Task[Any]] = set()
        # Calls side by side would share the tokens that are left.
        self._turn = nullcontext() if tokens is None else asyncio.Lock()
        self._refused: ContextFull | LimitReached | None = None
        self.failed: Exception | None = None
        self.on_failure: Callable[[], object] = lambda: None
        self.last: Answer | None = None
        self.stored: dict[str, Any] = {}

    def earlier(self, kind: str, known: str) -> Any:
        """What is stored under the id of an answer. Args: kind: of answer, as the API names it"""
        if known not in self.stored:
            raise RequestUnusable(f"previous_{kind}_id {known!r}: no {kind} of this rollout")
        return self.stored[known]

    @property
    def is_cut_off(self) -> bool:
        return self._refused is not None

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
            LimitReached: see there.
            RequestUnusable: see there; or the rollout has ended.
        """
        if self._is_closed:
            raise RequestUnusable("the rollout has ended")
        refused = self._refused
        with reading():
            asked = self._asked(messages, tools, sampling or {})
            is_text = text_parameters(tools)
        answering = asyncio.current_task()
        assert answering is not None
        self._answering.add(answering)
        try:
            async with self._turn:
                asked["max_tokens"] = self._allowed(asked["max_tokens"])
                answer = await self._dialogue.say(**asked)
                self._tokens += answer.new_tokens
        except (ContextFull, LimitReached) as error:
            self._refused = error
            raise
        finally:
            self._answering.discard(answering)
        if self._refused is refused:
            self._refused = None
        self.last = answer
        content, calls = self._parsed(answer, is_text) if tools else (str(answer), [])
        reason = "length" if not answer.finished else "tool_calls" if calls else "stop"
        said = ChatAnswer(content, calls, reason, answer.context_tokens, answer.new_tokens)
        if calls:
            self._texts[calls[0]["id"]] = (plain_message(said.message), str(answer))
        return said

    def count(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()
    ) -> int:
        """Tokens of a request that is not answered. Raises `RequestUnusable`."""
        with reading():
            asked = self._asked(messages, tools, {})
        return self._dialogue.count(asked["messages"], tools)

    def fail(self, error: Exception) -> None:
        self.failed = self.failed or error
        self.on_failure()

    async def close(self) -> None:
        """End the calls that are not answered yet: nothing more is recorded."""
        self._is_closed = True
        for answering in self._answering:
            answering.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    def finish(self) -> None:
        """Raises `failed`; and `ContextFull` if the prompt alone was too long: the policy said
        nothing. Else the dialogue learns whether it is cut off."""
        if self.failed is not None:
            raise self.failed
        if self._refused is not None and self.last is None:
            raise self._refused
        if self.is_cut_off:
            self._dialogue.cut_off()

    def _asked(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        sampling: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The arguments of `Dialogue.say`."""
        if not messages:
            raise RequestUnusable("expected at least one message")
        require_functions(tools)
        for tool in tools:
            name, about = tool["function"]["name"], tool["function"].get("description") or ""
            if not (name and isinstance(name, str) and isinstance(about, str)):
                raise RequestUnusable(
                    f"tools: expected texts as name and description; got {name!r} and {about!r}"
                )
        return {
            "messages": [self._as_said(message) for message in messages],
            "tools": tools,
            "max_tokens": _tokens_of(sampling),
            "stop": _stop_of(sampling),
        }

    def _allowed(self, asked: int | None) -> int | None:
        """Tokens that the next answer may have; None for the run's limit."""
        self._calls += 1
        if self._most_calls is not None and self._calls > self._most_calls:
            raise LimitReached(f"the rollout has had its {self._most_calls} calls")
        if self._most_tokens is None:
            return asked
        left = self._most_tokens - self._tokens
        if left < 1:
            raise LimitReached(f"the rollout has had its {self._most_tokens} tokens")
        return min(asked or left, left)

    def _as_said(self, message: ChatMessage) -> Message:
        plain = plain_message(message)
        for call in message.get("tool_calls") or ():
            parsed, text = self._texts.get(call.get("id"), (None, ""))
            if parsed == plain:
                return {"role": "assistant", "content": text}
        return plain

    def _parsed(self, answer: Answer, is_text: IsText) -> tuple[str | None, list[dict[str, Any]]]:
        """Content and calls, as vLLM's parsers: if one call is no JSON or has no name, the whole
        text is content."""
        content, calls = divided_by_calls(answer, is_text)
        if not calls or not all(call.name for call in calls):
            return str(answer), []
        listed = []
        for call in calls:
            self._tool_calls += 1
            arguments = call.written if call.error else dict(call.arguments)
            function = {"name": call.name, "arguments": json.dumps(arguments)}
            listed.append(
                {"id": f"call_{self._tool_calls}", "type": "function", "function": function}
            )
        return content.strip() or None, listed


def plain_message(message: ChatMessage) -> Message:
    """A message for the chat template, with its content as text and without empty fields. Raises
    `RequestUnusable`: the message holds an image or a sound."""
    # The developer's messages are the system's, under the name that OpenAI's newer models have.
    role = "system" if message["role"] == "developer" else message["role"]
    if not isinstance(role, str):
        raise RequestUnusable(f"the role of a message is {role!r}; expected a text")
    plain: dict[str, Any] = {"role": role, "content": _text_of(message)}
    plain |= {key: message[key] for key in ("name", *THOUGHTS) if message.get(key)}
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
        if kind not in _TEXTS:
            raise RequestUnusable(
                f"a {message['role']} message has a part of the type {kind!r}; expected text"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Chat templates expect the arguments as an object, the API sends them as JSON. verifiers' own
    form of a call has name and arguments at the top."""
    function = call.get("function") or call
    try:
        arguments = from_json(function["arguments"])
    except ValueError:
        arguments = function["arguments"]
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tokens_of(sampling: Mapping[str, Any]) -> int | None:
    given = (sampling.get(name) for name in ("max_completion_tokens", "max_tokens"))
    asked = next((value for value in given if value is not None), None)
    if asked is None or (isinstance(asked, int) and asked > 0 and asked is not True):
        return asked
    raise RequestUnusable(f"max_tokens: expected a number of tokens, at least 1; got {asked!r}")


def _stop_of(sampling: Mapping[str, Any]) -> tuple[str, ...]:
    stop = sampling.get("stop") or ()
    texts = tuple(stop) if isinstance(stop, list | tuple) else (stop,)
    if not all(isinstance(text, str) and text for text in texts):
        raise RequestUnusable(f"stop: expected texts that are not empty; got {stop!r}")
    return texts


def require_functions(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises `RequestUnusable` if one is of another type."""
    if others := sorted({str(tool.get("type", "function")) for tool in tools} - {"function"}):
        raise RequestUnusable(
            f"tools of the type {', '.join(others)}: only functions are supported"
        )
