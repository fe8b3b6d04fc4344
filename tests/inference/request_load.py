"""Many generation requests at once, from real clients that repeat nothing.

Some send one request after the other, others pause in between, so that their connections lie idle
in the pool; some open a connection for each request.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx

from tests.inference.engine_load import wait_for

CLIENTS = 12
TIMEOUT_S = 300.0
LONGEST_TOKENS = 200


@dataclass
class LoadReport:
    """`versions`: how many completions began under each [epoch, step]."""

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
        wait_for(lambda: self.answered >= enough, TIMEOUT_S)


@contextmanager
def load_on(url: str, clients: int = CLIENTS) -> Iterator[LoadReport]:
    """Requests go out as long as the block runs; at its end those under way are waited for."""
    report, stop = LoadReport(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_all(url, clients, report, stop)))
    thread.start()
    try:
        yield report
    finally:
        stop.set()
        thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "requests are still under way"


async def _all(url: str, clients: int, report: LoadReport, stop: threading.Event) -> None:
    limits = httpx.Limits(max_connections=None, keepalive_expiry=30.0)
    transport = httpx.AsyncHTTPTransport(retries=0, limits=limits)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with (
        httpx.AsyncClient(transport=transport, timeout=TIMEOUT_S) as pooled,
        aiohttp.ClientSession(timeout=timeout) as session,
        asyncio.TaskGroup() as group,
    ):
        for number in range(clients):
            with_httpx = number % 2 == 0
            client = _Httpx(pooled) if with_httpx else _Aiohttp(session)
            pauses = number % 4 >= 2
            group.create_task(_send(client, f"{url}/generate", number, pauses, report, stop))


@dataclass(frozen=True)
class _Httpx:
    client: httpx.AsyncClient

    async def post(self, url: str, body: dict[str, Any], close: bool) -> tuple[int, Any]:
        headers = {"connection": "close"} if close else {}
        answer = await self.client.post(url, json=body, headers=headers)
        return answer.status_code, answer.json()


@dataclass(frozen=True)
class _Aiohttp:
    session: aiohttp.ClientSession

    async def post(self, url: str, body: dict[str, Any], close: bool) -> tuple[int, Any]:
        headers = {"connection": "close"} if close else {}
        async with self.session.post(url, json=body, headers=headers) as answer:
            return answer.status, await answer.json()


async def _send(
    client: _Httpx | _Aiohttp,
    url: str,
    number: int,
    pauses: bool,
    report: LoadReport,
    stop: threading.Event,
) -> None:
    draw = random.Random(number)
    while not stop.is_set():
        tokens = draw.randint(1, LONGEST_TOKENS)
        body = {
            "prompt": {"prompt_token_ids": [draw.randrange(200) for _ in range(8)]},
            **{"max_tokens": tokens, "ignore_eos": True, "logprobs": 0, "temperature": 1.0},
        }
        try:
            status, answer = await client.post(url, body, close=draw.random() < 0.1)
        except (httpx.HTTPError, aiohttp.ClientError, TimeoutError) as error:
            report.problems.append(f"{type(client).__name__}: {error!r}")
            continue
        if status == 200:
            report.take(answer, tokens)
        else:
            report.problems.append(f"{status}: {answer}")
        if pauses:
            await asyncio.sleep(draw.uniform(0.0, 0.4))
