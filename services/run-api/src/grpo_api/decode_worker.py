"""A process beside the server that decodes large submissions: they would keep others waiting.

Parsing JSON holds the interpreter for as long as it takes, about 10 ms per megabyte, so a thread
would not do.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import structlog

from grpo_api.decoding import Decode, Decoded, RawBody
from grpo_api.errors import Refused, StoreUnavailable

_DEADLINE_S = 30.0
_log = structlog.get_logger()


@dataclass(frozen=True)
class _Refusal:
    """A `Refused` on its way between processes."""

    status: int
    detail: str | list[dict[str, Any]]


class DecodeWorker:
    """Started with the first large submission; one at a time is decoded."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._turn = asyncio.Semaphore(1)
        self._pool: ProcessPoolExecutor | None = None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, decode: Decode, body: RawBody) -> Decoded:
        """
        Raises:
            Refused: as `decode` says.
            StoreUnavailable: others before it took too long, or the process ended.
        """
        try:
            async with asyncio.timeout(_DEADLINE_S), self._turn:
                return await self._decode(decode, body)
        except TimeoutError as error:
            raise StoreUnavailable(
                f"a large submission was not decoded within {_DEADLINE_S:g} s; send smaller ones"
            ) from error

    async def _decode(self, decode: Decode, body: RawBody) -> Decoded:
        self._pool = self._pool or _start()
        loop = asyncio.get_running_loop()
        try:
            outcome = await loop.run_in_executor(
                self._pool, _guarded, decode, body, self._max_bytes
            )
        except BrokenProcessPool as error:
            self._pool = None
            _log.warning("the process that decodes large submissions ended", reason=str(error))
            raise StoreUnavailable(
                "the process that decodes large submissions ended; is memory short?"
            ) from error
        if isinstance(outcome, _Refusal):
            raise Refused(outcome.status, outcome.detail)
        return outcome


def _start() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        max_workers=1,
        # a fork would copy the server's sockets and event loop
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_end_with_the_server,
    )


def _end_with_the_server() -> None:
    """A server that is killed cannot tell its worker, which would wait for work for ever."""
    # Ctrl-C reaches a terminal's whole process group, and the server finishes what it has begun
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = multiprocessing.parent_process()
    assert server is not None

    def watch() -> None:
        connection.wait([server.sentinel])
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _guarded(decode: Decode, body: RawBody, max_bytes: int) -> Decoded | _Refusal:
    try:
        return decode(body, max_bytes)
    except Refused as error:
        return _Refusal(error.status, error.detail)
