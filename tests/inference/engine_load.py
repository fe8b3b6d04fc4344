"""Generation requests in progress, and how busy they keep the engine, by vLLM's own metrics."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from tests.fixtures.inference import InferenceServer
from tests.support.wait import wait_for

ANSWER_DEADLINE_S = 300.0
RUNNING, WAITING = "vllm:num_requests_running{", "vllm:num_requests_waiting{"
GENERATED_TOKENS = "vllm:generation_tokens_total{"
MOST_RUNNING = 64
"""Sequences that the servers of these tests run at once (`--max-num-seqs`)."""


def running_sequences(server: InferenceServer) -> float:
    """Sequences that the engine has begun and not ended."""
    return _sum_of(server, RUNNING)


def unfinished_sequences(server: InferenceServer) -> float:
    return _sum_of(server, RUNNING, WAITING)


def generated_tokens(server: InferenceServer) -> float:
    """By every request since the engine started."""
    return _sum_of(server, GENERATED_TOKENS)


def _sum_of(server: InferenceServer, *metrics: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(metrics))


@contextmanager
def posted_in_background(url: str, body: dict[str, object]) -> Iterator[Future[Any]]:
    """A generation request whose answer the future holds; the block's end waits for it."""

    def post() -> Any:
        answer = httpx.post(f"{url}/generate", json=body, timeout=ANSWER_DEADLINE_S)
        return answer.raise_for_status().json()

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(post)


def wait_until_running(server: InferenceServer, count: int, request: Future[Any]) -> bool:
    """Wait until `count` sequences run at once. False if the request ended unseen."""
    wait_for(lambda: request.done() or running_sequences(server) == count)
    return not request.done()
