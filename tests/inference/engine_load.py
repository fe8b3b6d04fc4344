"""Requests under way, how busy they keep the engine, and waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from tests.fixtures.inference import InferenceServer

ANSWER_DEADLINE_S = 300.0
DEADLINE_S = 60.0
"""For what comes at once on an idle machine."""
TRIES = 5
"""For what is there for a moment alone, which a machine with other work may sleep through."""

T = TypeVar("T")

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


@dataclass(frozen=True)
class Posted:
    """A generation request under way."""

    future: Future[httpx.Response]

    def has_ended(self) -> bool:
        return self.future.done()

    def answer(self) -> Any:
        """Waits for it."""
        return self.future.result(ANSWER_DEADLINE_S).raise_for_status().json()


@contextmanager
def posted_in_background(url: str, body: dict[str, object]) -> Iterator[Posted]:
    with ThreadPoolExecutor(1) as pool:
        yield Posted(
            pool.submit(httpx.post, f"{url}/generate", json=body, timeout=ANSWER_DEADLINE_S)
        )


def all_run(server: InferenceServer, count: int, ended: Callable[[], bool]) -> bool:
    """Wait until `count` sequences run at once. False where they ended before that was seen."""
    wait_for(lambda: ended() or running_requests(server) == count)
    return not ended()


def in_time(attempt: Callable[[], T | None]) -> T:
    """What it returns the first time that it does not come too late, which it says by None."""
    for _ in range(TRIES):
        if (result := attempt()) is not None:
            return result
    raise AssertionError(f"{TRIES} times too late")


def wait_for(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> float:
    """Poll until it holds; returns the seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < deadline_s, f"not within {deadline_s} s"
        time.sleep(0.05)
    return time.monotonic() - started
