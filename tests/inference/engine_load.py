"""Requests under way, how busy they keep the engine, and waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from tests.fixtures.inference import InferenceServer

ANSWER_DEADLINE_S = 300.0
DEADLINE_S = 60.0
"""For what comes at once on an idle machine."""

RUNNING, WAITING = "vllm:num_requests_running{", "vllm:num_requests_waiting{"


def unfinished_requests(server: InferenceServer) -> float:
    """Sequences running and waiting, by vLLM's own gauges."""
    return _sum_of(server, RUNNING, WAITING)


def running_requests(server: InferenceServer) -> float:
    """Sequences that the engine has begun with, by vLLM's own gauge."""
    return _sum_of(server, RUNNING)


def _sum_of(server: InferenceServer, *gauges: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=DEADLINE_S).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(gauges))


def unfinished_after_steps(server: InferenceServer, steps: int = 60) -> float:
    """Sequences running and waiting once the engine has made so many steps more: a clock that is
    right however busy the machine is.

    A request of as many tokens counts the steps, so there has to be room for it.
    """
    body = {"prompt": {"prompt_token_ids": [9]}, "max_tokens": steps, "ignore_eos": True}
    httpx.post(f"{server.url}/generate", json=body, timeout=ANSWER_DEADLINE_S).raise_for_status()
    return unfinished_requests(server)


@contextmanager
def posted_in_background(url: str, body: dict[str, object]) -> Iterator[Callable[[], Any]]:
    """A generation request under way; calling what is yielded waits for its answer."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(httpx.post, f"{url}/generate", json=body, timeout=ANSWER_DEADLINE_S)
        yield lambda: future.result(ANSWER_DEADLINE_S).raise_for_status().json()


def wait_for(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> float:
    """Poll until it holds; returns the seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < deadline_s, f"not within {deadline_s} s"
        time.sleep(0.05)
    return time.monotonic() - started
