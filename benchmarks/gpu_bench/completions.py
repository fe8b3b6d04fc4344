"""Requests for completions over connections that are open beforehand.

Made of asyncio's streams: where 256 requests are answered in a second, a client in Python that does
more for each of them would be a part of what is measured.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from benchmarks.gpu_bench.servers import SERVED_NAME
from grpo_core.errors import GrpoError

PATH = "/v1/completions"
ANSWER_DEADLINE_S = 120.0
_PROMPT_VOCABULARY = 256
"""Prompts are of bytes, which every tokenizer of the benchmark knows."""
_SHOWN_BYTES = 300


class NoCompletion(GrpoError):
    """A server did not answer a request as it was asked, so that a number would say nothing."""


@dataclass(frozen=True)
class CompletionRequest:
    """`prompt`: token ids. Exactly `new_tokens` are sampled."""

    prompt: list[int]
    new_tokens: int

    def encoded(self, host: str) -> bytes:
        body = json.dumps(
            {
                "model": SERVED_NAME,
                "prompt": self.prompt,
                "max_tokens": self.new_tokens,
                "ignore_eos": True,
            }
        ).encode()
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def random_request(
    generator: random.Random, prompt_tokens: int, new_tokens: int
) -> CompletionRequest:
    """A prompt of its own, so that no cache of prompts knows its beginning."""
    prompt = generator.choices(range(_PROMPT_VOCABULARY), k=prompt_tokens)
    return CompletionRequest(prompt, new_tokens)


class Connection:
    """One, kept alive. `async with Connection(url)`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._place = parts.hostname, parts.port
        self._host = parts.netloc

    async def __aenter__(self) -> Self:
        try:
            self._reader, self._writer = await asyncio.open_connection(*self._place)
        except OSError as error:
            raise NoCompletion(f"{self._host}: {error}") from error
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._writer.close()

    async def complete(self, request: CompletionRequest) -> int:
        """Returns how many tokens were sampled.

        Raises:
            NoCompletion: an error, no answer within 120 s, or another number than was asked for.
        """
        try:
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                self._writer.write(request.encoded(self._host))
                status, body = await self._answer()
        except (OSError, EOFError, TimeoutError) as error:
            raise NoCompletion(f"{self._host}{PATH}: {error!r}") from error
        if status != 200:
            raise NoCompletion(f"{self._host}{PATH}: {status}, {body[:_SHOWN_BYTES]!r}")
        sampled: int = json.loads(body)["usage"]["completion_tokens"]
        if sampled != request.new_tokens:
            raise NoCompletion(f"{sampled} tokens were sampled instead of {request.new_tokens}")
        return sampled

    async def _answer(self) -> tuple[int, bytes]:
        """Status and body, whose length the answer must name."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status_line, *lines = head.split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        body = await self._reader.readexactly(int(headers["content-length"]))
        return int(status_line.split()[1]), body
