"""A dialogue whose answers the test writes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_env.tasks import Answer, ContextFull, Message


class ScriptedDialogue:
    """Says one text after the other, with one token for each character. Without a text left, the
    context is full.

    requests: the messages of each request, as plain dictionaries.
    options: the other arguments of each request.
    """

    def __init__(self, *texts: str, cut_off: bool = False, delay_s: float = 0.0) -> None:
        self._texts = [*texts]
        self._cut_off = cut_off
        self._delay_s = delay_s
        self._tokens: list[int] = []
        self.requests: list[list[dict[str, Any]]] = []
        self.options: list[dict[str, Any]] = []

    async def say(
        self,
        messages: str | Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Answer:
        await asyncio.sleep(self._delay_s)
        assert not isinstance(messages, str)
        self.requests.append([dict(message) for message in messages])
        self.options.append({"tools": [*tools], "max_tokens": max_tokens, "stop": tuple(stop)})
        if not self._texts:
            raise ContextFull("the conversation would have 513 tokens")
        text = self._texts.pop(0)
        self._tokens += [ord(character) for character in text]
        said: Message = {"role": "assistant", "content": text}
        self.last_answer = Answer(
            text,
            finished=not self._cut_off,
            messages=[*messages, said],
            token_ids=[*self._tokens],
            context_tokens=len(messages),
            new_tokens=len(text),
        )
        return self.last_answer

    def count(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        return len(messages) + len(tools)

    def cut_off(self) -> None:
        self.last_answer.finished = False
