"""Decoding under a fixed load: measured by itself, or going on beside something else."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Iterator
from itertools import count

from benchmarks.gpu_bench.completion_log import CompletionLog
from benchmarks.gpu_bench.completions import Connection, random_request
from benchmarks.gpu_bench.settings import LoadWork

_numbers = count()
"""Of loads: each draws other prompts than those before it."""
STOP_DEADLINE_S = 60.0


def decode(url: str, concurrency: int, prompt_tokens: int, new_tokens: int) -> float:
    """Tokens per second of `concurrency` requests that are sent at once, prefill included.

    Raises:
        NoCompletion: one of them was not answered as it was asked.
    """
    return asyncio.run(_decode(url, concurrency, prompt_tokens, new_tokens))


async def _decode(url: str, concurrency: int, prompt_tokens: int, new_tokens: int) -> float:
    generator = random.Random(next(_numbers))
    requests = [random_request(generator, prompt_tokens, new_tokens) for _ in range(concurrency)]
    async with contextlib.AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(Connection(url)) for _ in requests]
        began = time.perf_counter()
        pairs = zip(connections, requests, strict=True)
        await asyncio.gather(*(connection.complete(request) for connection, request in pairs))
        return concurrency * new_tokens / (time.perf_counter() - began)


class BackgroundLoad:
    """Generations in a thread of their own.

    Args:
        requests: ends after so many; None: when told to
    """

    def __init__(self, url: str, work: LoadWork, requests: int | None = None) -> None:
        self.log = CompletionLog()
        self._url = url
        self._work = work
        self._left = None if requests is None else iter(range(requests))
        self._random = random.Random(next(_numbers))
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Requests under way are waited for."""
        self._stopping.set()
        self._thread.join(STOP_DEADLINE_S)

    @property
    def is_over(self) -> bool:
        """All requests were answered, or one was not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until all requests were answered. Raises what went wrong."""
        self._thread.join()
        self.check()

    def check(self) -> None:
        """Raises what went wrong in the thread, if anything did."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            asyncio.run(self._all())
        except ExceptionGroup as errors:
            self._error = errors.exceptions[0]

    async def _all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._work.concurrency):
                group.create_task(self._one_after_the_other())

    async def _one_after_the_other(self) -> None:
        work = self._work
        async with Connection(self._url) as connection:
            while not self._stopping.is_set():
                if self._left is not None and next(self._left, None) is None:
                    return
                new_tokens = self._random.randint(*work.new_tokens)
                request = random_request(self._random, work.prompt_tokens, new_tokens)
                sampled = await connection.complete(request)
                self.log.add(time.monotonic(), sampled)


@contextlib.contextmanager
def background_load(
    url: str, work: LoadWork, requests: int | None = None
) -> Iterator[BackgroundLoad]:
    """Goes on inside the context. Raises at its end what went wrong in it."""
    load = BackgroundLoad(url, work, requests)
    load.start()
    try:
        yield load
    finally:
        load.stop()
    load.check()
