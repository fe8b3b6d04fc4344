"""Starts generation requests and measures the engine's load with vLLM's own metrics."""

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
