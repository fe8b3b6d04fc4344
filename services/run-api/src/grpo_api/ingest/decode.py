"""From the body of a submission to groups that are ready to be stored.

Bodies of a usual size are decoded where they arrive. What would keep other requests waiting is
decoded by a process beside the server, with the same functions.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Annotated, Any

import structlog
from isal import isal_zlib
from pydantic import Field, TypeAdapter, ValidationError

from grpo_api.errors import Refused, StoreUnavailable
from grpo_api.http.error_responses import invalid
from grpo_api.http.request_body import (
    INLINE_BYTES,
    RawBody,
    TooMuchWork,
    inflate,
    inflate_member,
)
from grpo_api.ingest.codec import PackedGroup, compress, pack, stored
from grpo_api.ingest.group_scan import scan_group
from grpo_core.wire import ScoredGroup

MAX_GROUPS = 1024
"""In one list. They are queued in one step, during which Redis serves nobody else."""

_LIST: TypeAdapter[list[ScoredGroup]] = TypeAdapter(
    Annotated[list[ScoredGroup], Field(fail_fast=True, max_length=MAX_GROUPS)]
)


@dataclass(frozen=True)
class Decoded:
    """Attributes:
    fingerprint: of the JSON as it was sent; the same for a body that is sent again.
    """

    groups: list[PackedGroup]
    fingerprint: str


Decode = Callable[[RawBody, int | None], Decoded]
"""
Args:
    max_bytes: largest content to decode, or None for `INLINE_BYTES` and what is simple.
Raises:
    TooMuchWork: without `max_bytes`: it has to be decoded elsewhere.
    Refused: 400 for broken gzip, 413 above `max_bytes`, 422 for what breaks the record.
"""


def decode_group(body: RawBody, max_bytes: int | None) -> Decoded:
    """The one group of a `POST /scored_data`, as `Decode`."""
    text = _content(body, max_bytes)
    facts = scan_group(text)
    if facts is None:
        group = pack(_validated(text))
    else:
        # Read without a limit of its own, it may be in several members: what is stored has one.
        member = body.content if body.is_gzip and max_bytes is None else compress(text)
        group = PackedGroup(facts.env_id, facts.sequences, stored(member, facts.absent))
    return Decoded([group], _fingerprint(text))


def decode_groups(body: RawBody, max_bytes: int | None) -> Decoded:
    """The groups of a `POST /scored_data_list`, as `Decode`."""
    text = _content(body, max_bytes)
    try:
        groups = _LIST.validate_json(text)
    except ValidationError as error:
        raise invalid(error) from error
    return Decoded([pack(group) for group in groups], _fingerprint(text))


def _content(body: RawBody, max_bytes: int | None) -> bytes:
    if body.is_gzip and max_bytes is None:
        return inflate_member(body.content, INLINE_BYTES)
    if body.is_gzip and max_bytes is not None:
        return inflate(body.content, max_bytes)
    if max_bytes is None and len(body.content) > INLINE_BYTES:
        raise TooMuchWork
    return body.content


def _validated(text: bytes) -> ScoredGroup:
    """By pydantic's own parser, which refuses what Python's would let through or fail on: lone
    surrogates, nesting without end, integers of any length, bytes that are not UTF-8."""
    try:
        return ScoredGroup.model_validate_json(text)
    except ValidationError as error:
        raise invalid(error) from error


def _fingerprint(text: bytes) -> str:
    return f"{isal_zlib.crc32(text):08x}{len(text):x}"


class SubmissionDecoder:
    """Attributes:
    max_bytes: largest body, as sent and after decompression.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._worker = DecodeWorker(max_bytes)

    def close(self) -> None:
        self._worker.close()

    async def decode(self, decode: Decode, body: RawBody) -> Decoded:
        """
        Raises:
            Refused: 400 for broken gzip, 413 above `max_bytes`, 422 for what breaks the record.
            StoreUnavailable: others before it took too long.
        """
        try:
            return decode(body, None)
        except TooMuchWork:
            return await self._worker.run(decode, body)


_TURN_S = 30.0
"""How long a submission waits for others: longer than one of them can take."""
_DECODING_S = 20.0
"""Several times what the largest body takes; the start of the process included."""
_log = structlog.get_logger()


@dataclass(frozen=True)
class _Refusal:
    """A `Refused` on its way between processes."""

    status: int
    detail: str | list[dict[str, Any]]


@dataclass(frozen=True)
class _Worker:
    pool: ProcessPoolExecutor
    processes: Sequence[BaseProcess]

    def end(self) -> None:
        """At once, and also where it hangs: the pool's own shutdown would wait for it."""
        for process in self.processes:
            process.kill()
        self.pool.shutdown(wait=False, cancel_futures=True)


class DecodeWorker:
    """Started with the first large submission; one at a time is decoded."""

    def __init__(
        self, max_bytes: int, *, turn_s: float = _TURN_S, decoding_s: float = _DECODING_S
    ) -> None:
        self._max_bytes = max_bytes
        self._turn_s = turn_s
        self._decoding_s = decoding_s
        self._turn = asyncio.Lock()
        self._worker: _Worker | None = None
        self._running: asyncio.Task[Decoded] | None = None

    def close(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    async def run(self, decode: Decode, body: RawBody) -> Decoded:
        """
        Raises:
            Refused: as `decode` says.
            StoreUnavailable: others before it took too long, or the process ended or hangs.
        """
        await self._take_turn()
        # Not cancelled with its request: the process is busy with it until it is done.
        self._running = asyncio.create_task(self._decode(decode, body))
        self._running.add_done_callback(self._end_turn)
        return await asyncio.shield(self._running)

    async def _take_turn(self) -> None:
        try:
            async with asyncio.timeout(self._turn_s):
                await self._turn.acquire()
        except TimeoutError as error:
            raise StoreUnavailable(
                f"large submissions that arrived earlier were not decoded within {self._turn_s:g} "
                "s; send the same groups again"
            ) from error

    def _end_turn(self, decoding: asyncio.Task[Decoded]) -> None:
        self._turn.release()
        if not decoding.cancelled():
            decoding.exception()  # read, or asyncio would log it where the request is gone

    async def _decode(self, decode: Decode, body: RawBody) -> Decoded:
        self._worker = self._worker or _start()
        try:
            async with asyncio.timeout(self._decoding_s):
                outcome = await asyncio.wrap_future(
                    self._worker.pool.submit(_guarded, decode, body, self._max_bytes)
                )
        except BrokenProcessPool as error:
            _log.warning("the process that decodes large submissions ended", reason=str(error))
            self._worker = None
            raise StoreUnavailable(
                "the process that decodes large submissions ended; is memory short?"
            ) from error
        except TimeoutError as error:
            _log.warning("the process that decodes large submissions hangs and is replaced")
            self.close()
            raise StoreUnavailable(
                "the process that decodes large submissions did not answer within "
                f"{self._decoding_s:g} s and is replaced; send the same groups again"
            ) from error
        if isinstance(outcome, _Refusal):
            raise Refused(outcome.status, outcome.detail)
        return outcome


def _start() -> _Worker:
    before = multiprocessing.active_children()
    pool = ProcessPoolExecutor(
        max_workers=1,
        # a fork would copy the server's sockets and event loop
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_end_with_the_server,
    )
    # The pool starts its process with the first work that it is given, and does not hand it out.
    pool.submit(int)
    processes = [child for child in multiprocessing.active_children() if child not in before]
    return _Worker(pool, processes)


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
