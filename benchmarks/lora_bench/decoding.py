"""Tokens per second of one server under a fixed load."""

from __future__ import annotations

import asyncio
import time

import httpx

PROMPT_TOKENS = 16
TIMEOUT_S = 300.0


async def decode(url: str, model: str, concurrency: int, requests: int, tokens: int) -> float:
    """Tokens per second of `requests` completions of `tokens` tokens, `concurrency` at a time."""
    waiting = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:

        async def one(number: int) -> int:
            prompt = [(number * 31 + i) % 200 for i in range(PROMPT_TOKENS)]
            body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
            async with waiting:
                answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()
            sampled: int = answer.json()["usage"]["completion_tokens"]
            return sampled

        started = time.monotonic()
        sampled = await asyncio.gather(*(one(number) for number in range(requests)))
        return sum(sampled) / (time.monotonic() - started)
