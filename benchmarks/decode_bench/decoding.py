"""Tokens per second of one server under a fixed load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

PROMPT_TOKENS = 16


@dataclass(frozen=True)
class DecodeLoad:
    """`requests` requests, `concurrency` at a time, for `n` completions of `tokens` tokens each."""

    requests: int
    concurrency: int
    tokens: int
    n: int = 1

    @property
    def sampled_tokens(self) -> int:
        return self.requests * self.n * self.tokens


Body = Callable[[list[int]], dict[str, Any]]
"""Prompt, as token ids → body of the request."""


async def decode(url: str, body: Body, load: DecodeLoad) -> float:
    """Tokens per second of the requests that `body` makes, sent to `url`."""
    connector = aiohttp.TCPConnector(limit=load.concurrency)
    async with aiohttp.ClientSession(connector=connector, raise_for_status=True) as client:

        async def one(number: int) -> None:
            prompt = [(number * 31 + i) % 200 for i in range(PROMPT_TOKENS)]
            async with client.post(url, json=body(prompt)) as answer:
                await answer.read()

        started = time.monotonic()
        await asyncio.gather(*(one(number) for number in range(load.requests)))
        return load.sampled_tokens / (time.monotonic() - started)


def completions(model: str, load: DecodeLoad, **more: Any) -> Body:
    """For `POST /v1/completions`."""
    fixed = {"model": model, "max_tokens": load.tokens, "n": load.n, "ignore_eos": True, **more}
    return lambda prompt: {**fixed, "prompt": prompt}


def generate(load: DecodeLoad) -> Body:
    """For `POST /generate`, whose answer has the logprobs of the sampled tokens."""
    fixed = {"max_tokens": load.tokens, "n": load.n, "ignore_eos": True}
    return lambda prompt: {**fixed, "prompt": {"prompt_token_ids": prompt}}
