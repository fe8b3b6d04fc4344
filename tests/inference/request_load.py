"""Sends generation requests, also many at once, and measures the load."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx

from tests.fixtures.inference import InferenceServer
from tests.support.wait import wait_for

Body = dict[str, Any]
Post = Callable[[Body, dict[str, str]], Awaitable[tuple[int, Any]]]
"""Sends body and headers; returns status and answer."""
CLIENTS = 6
TIMEOUT_S = 300.0
LONGEST_TOKENS = 80


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
        except (httpx.HTTPError, aiohttp.ClientError, TimeoutError, ValueError) as error:
            report.problems.append(repr(error))
            continue
        if status == 200:
            report.take(answer, tokens)
        else:
            report.problems.append(f"{status}: {answer}")
        if pauses:
            await asyncio.sleep(draw.uniform(0.0, 0.4))


ANSWER_DEADLINE_S = 300.0
RUNNING, WAITING = "vllm:num_requests_running{", "vllm:num_requests_waiting{"
GENERATED_TOKENS = "vllm:generation_tokens_total{"
MOST_RUNNING = 64
"""The number of sequences that these tests' servers run at once (`--max-num-seqs`)."""


def running_sequences(server: InferenceServer) -> float:
    """Sequences that the engine has started and not finished."""
    return _sum_of(server, RUNNING)


def unfinished_sequences(server: InferenceServer) -> float:
    return _sum_of(server, RUNNING, WAITING)


def generated_tokens(server: InferenceServer) -> float:
    """Tokens of all requests since the engine started."""
    return _sum_of(server, GENERATED_TOKENS)


def _sum_of(server: InferenceServer, *metrics: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(metrics))


@contextmanager
def posted_in_background(url: str, body: dict[str, object]) -> Iterator[Future[Any]]:
    """Send a generation request. The future holds its answer; the end of the block waits for it."""

    def post() -> Any:
        answer = httpx.post(f"{url}/generate", json=body, timeout=ANSWER_DEADLINE_S)
        return answer.raise_for_status().json()

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(post)


def wait_until_running(server: InferenceServer, count: int, request: Future[Any]) -> bool:
    """Wait until `count` sequences run at once. False if the request ended first."""
    wait_for(lambda: request.done() or running_sequences(server) == count)
    return not request.done()
