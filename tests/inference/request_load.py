"""Sends many generation requests at once, from real clients that never retry.

Half of the clients pause between requests, so that their connections become idle. One request in
ten closes its connection.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx

from tests.support.wait import wait_for

Body = dict[str, Any]
Post = Callable[[Body, dict[str, str]], Awaitable[tuple[int, Any]]]
"""Sends body and headers; returns status and answer."""
CLIENTS = 12
TIMEOUT_S = 300.0
LONGEST_TOKENS = 200


@dataclass
class LoadReport:
    """`versions`: [epoch, step] → number of completions that began with it."""

    answered: int = 0
    problems: list[str] = field(default_factory=list)
    versions: Counter[tuple[int, int]] = field(default_factory=Counter)

    def take(self, answer: dict[str, Any], tokens: int) -> None:
        self.answered += 1
        versions = answer["policy_version"]
        if len(versions) != 1 or len(versions[0]) != 2:
            self.problems.append(f"completion without its two versions: {versions}")
            return
        if len(answer["token_ids"][0]) != tokens:
            self.problems.append(f"{len(answer['token_ids'][0])} of {tokens} tokens")
        self.versions[tuple(versions[0][0])] += 1

    def wait_for_answers(self, more: int) -> None:
        enough = self.answered + more
        wait_for(lambda: self.answered, lambda answered: answered >= enough, TIMEOUT_S)


@contextmanager
def load_on(url: str, clients: int = CLIENTS) -> Iterator[LoadReport]:
    """Send requests while the block runs. Its end waits for the outstanding answers."""
    report, stop = LoadReport(), threading.Event()
    thread = threading.Thread(
        target=lambda: asyncio.run(_all(f"{url}/generate", clients, report, stop))
    )
    thread.start()
    try:
        yield report
    finally:
        stop.set()
        thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "requests are still in progress"


async def _all(url: str, clients: int, report: LoadReport, stop: threading.Event) -> None:
    limits = httpx.Limits(max_connections=None, keepalive_expiry=30.0)
    transport = httpx.AsyncHTTPTransport(retries=0, limits=limits)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with (
        httpx.AsyncClient(transport=transport, timeout=TIMEOUT_S) as pooled,
        aiohttp.ClientSession(timeout=timeout) as session,
        asyncio.TaskGroup() as group,
    ):

        async def with_httpx(body: Body, headers: dict[str, str]) -> tuple[int, Any]:
            answer = await pooled.post(url, json=body, headers=headers)
            return answer.status_code, answer.json()

        async def with_aiohttp(body: Body, headers: dict[str, str]) -> tuple[int, Any]:
            async with session.post(url, json=body, headers=headers) as answer:
                return answer.status, await answer.json()

        posts = (with_httpx, with_aiohttp)
        for number in range(clients):
            pauses = number % 4 >= 2
            group.create_task(_send(posts[number % 2], number, pauses, report, stop))


async def _send(
    post: Post, number: int, pauses: bool, report: LoadReport, stop: threading.Event
) -> None:
    draw = random.Random(number)
    while not stop.is_set():
        tokens = draw.randint(1, LONGEST_TOKENS)
        body = {
            "prompt": {"prompt_token_ids": [draw.randrange(200) for _ in range(8)]},
            **{"max_tokens": tokens, "ignore_eos": True, "logprobs": 0, "temperature": 1.0},
        }
        headers = {"connection": "close"} if draw.random() < 0.1 else {}
        try:
            status, answer = await post(body, headers)
        except (httpx.HTTPError, aiohttp.ClientError, TimeoutError) as error:
            report.problems.append(repr(error))
            continue
        if status == 200:
            report.take(answer, tokens)
        else:
            report.problems.append(f"{status}: {answer}")
        if pauses:
            await asyncio.sleep(draw.uniform(0.0, 0.4))
