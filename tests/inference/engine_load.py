"""Requests under way, how busy they keep the engine, and waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from tests.fixtures.inference import InferenceServer

GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting{")


def running_requests(server: InferenceServer) -> float:
    """Sequences running and waiting, by vLLM's own gauges."""
    lines = httpx.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(GAUGES))


@contextmanager
def posted_in_background(url: str, body: dict[str, object]) -> Iterator[Callable[[], Any]]:
    """A generation request under way; calling what is yielded waits for its answer."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(httpx.post, f"{url}/generate", json=body, timeout=60)
        yield lambda: future.result(60).raise_for_status().json()


def wait_for(condition: Callable[[], bool], deadline_s: float) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < deadline_s, f"not within {deadline_s} s"
        time.sleep(0.05)
    return time.monotonic() - started
