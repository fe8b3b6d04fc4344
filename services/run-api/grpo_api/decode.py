"""Decompresses a body, and decodes a submission into groups that are ready to be stored.

Bodies of a usual size are decoded on the event loop. A large body would delay other requests, so a
second process decodes it with the same functions.
"""

from __future__ import annotations

import asyncio
import io
import multiprocessing
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Annotated

import structlog
from isal import igzip, isal_zlib
from isal.isal_zlib import IsalError
from pydantic import Field, TypeAdapter

from grpo_api.errors import Refused, StoreUnavailable, too_large, validated
from grpo_api.group_scan import scan_group
from grpo_api.store.payloads import GZIP_WINDOW_BITS, PackedGroup, compress, pack, payload_of
from grpo_api.store.queue import Submission
from grpo_api.waiting import in_turn
from grpo_core.wire.scored_group import ScoredGroup

INLINE_BYTES = 1024 * 1024
"""Content up to this size is decoded on the event loop: usually 1 to 2 ms, at worst 20 ms."""
MAX_GROUPS = 1024
"""Limit on the groups of one list. Redis answers no other request while it queues them."""

_LIST: TypeAdapter[list[ScoredGroup]] = TypeAdapter(
    Annotated[list[ScoredGroup], Field(fail_fast=True, max_length=MAX_GROUPS)]
)
_TURN_S = 30.0
"""Limit on waiting for earlier large submissions; longer than one of them can take."""
_RESTART = "run-api starts a new decoder process for the next large submission"
log = structlog.get_logger()


@dataclass(frozen=True)
class RawBody:
    """A request's body as it arrived. `is_gzip`: its Content-Encoding is gzip."""

    content: bytes
    is_gzip: bool


class TooMuchWork(Exception):
    """The content is too large to decode on the event loop."""


def inflate_member(body: bytes, max_bytes: int) -> bytes:
    """Decompress a body of exactly one gzip member, which is the usual case.

    Raises:
        TooMuchWork: the content is longer than `max_bytes`, or bytes follow the member.
        Refused: 400, the body is not valid gzip.
    """
    inflater = isal_zlib.decompressobj(GZIP_WINDOW_BITS)
    try:
        # One byte more than allowed distinguishes "exactly full" from "too long".
        content: bytes = inflater.decompress(body, max_bytes + 1)
    except IsalError as error:  # type: ignore[misc]  # its type stub declares an instance
        raise _not_gzip(error) from error
    if len(content) > max_bytes or inflater.unused_data or not body:
        raise TooMuchWork
    if not inflater.eof:
        raise _not_gzip("the body ends before the end of the compressed data")
    return content


def inflate(body: bytes, max_bytes: int) -> bytes:
    """Decompress any number of gzip members (RFC 1952), with zeros between and after them.

    Raises:
        Refused: 413, the content is longer than `max_bytes` (no more is ever decompressed); or
            400, the body is not valid gzip.
    """
    try:
        with igzip.open(io.BytesIO(body)) as file:  # type: ignore[no-untyped-call]
            content: bytes = file.read(max_bytes + 1)
    except (IsalError, OSError, EOFError) as error:  # type: ignore[misc]  # as above
        raise _not_gzip(error) from error
    if len(content) > max_bytes:
        raise too_large(max_bytes)
    return content


def _not_gzip(reason: object) -> Refused:
    return Refused(400, f"the body is not valid gzip: {reason}")


Decode = Callable[[RawBody, int | None], Submission]
"""
Args:
    max_bytes: largest content to decode; None decodes up to `INLINE_BYTES`, in one gzip member.
Raises:
    TooMuchWork: without `max_bytes`: the decoder process must decode this body.
    Refused: 400, broken gzip; 413, longer than `max_bytes`; 422, an invalid group.
"""


def decode_group(body: RawBody, max_bytes: int | None) -> Submission:
    """Decode the one group of a `POST /scored_data`; see `Decode`."""
    text = _content(body, max_bytes)
    facts = scan_group(text)
    if facts is None:
        # pydantic's own parser rejects input that Python's parser accepts or crashes on: lone
        # surrogates, endless nesting, integers of any length, bytes that are not UTF-8.
        group = pack(validated(ScoredGroup.model_validate_json, text))
    else:
        # A body that was read with `max_bytes` may have several gzip members; a payload has one.
        member = body.content if body.is_gzip and max_bytes is None else compress(text)
        group = PackedGroup(facts.env_id, facts.sequences, payload_of(member, facts.absent))
    return Submission([group], _fingerprint(text))


def decode_groups(body: RawBody, max_bytes: int | None) -> Submission:
    """Decode the groups of a `POST /scored_data_list`; see `Decode`."""
    text = _content(body, max_bytes)
    groups = validated(_LIST.validate_json, text)
    return Submission([pack(group) for group in groups], _fingerprint(text))


def _content(body: RawBody, max_bytes: int | None) -> bytes:
    if body.is_gzip and max_bytes is None:
        return inflate_member(body.content, INLINE_BYTES)
    if body.is_gzip and max_bytes is not None:
        return inflate(body.content, max_bytes)
    if max_bytes is None and len(body.content) > INLINE_BYTES:
        raise TooMuchWork
    return body.content


def _fingerprint(text: bytes) -> str:
    return f"{isal_zlib.crc32(text):08x}{len(text):x}"


class SubmissionDecoder:
    """Decodes small submissions on the event loop and large ones in the decoder process.

    A thread would not help: parsing holds the interpreter lock, for about 10 ms per megabyte. The
    process starts with the first large submission and decodes one at a time.

    Args:
        max_bytes: largest body, both as sent and after decompression.
        decoding_s: limit on one submission, including the start of the process.
    """

    def __init__(self, max_bytes: int, *, decoding_s: float = 20.0) -> None:
        self.max_bytes = max_bytes
        self._decoding_s = decoding_s
        self._turn = asyncio.Lock()
        self._process: _DecodeProcess | None = None

    def close(self) -> None:
        """Kill the decoder process."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    async def decode(self, decode: Decode, body: RawBody) -> Submission:
        """
        Raises:
            Refused: 400, broken gzip; 413, longer than `max_bytes`; 422, an invalid group.
            StoreUnavailable: earlier submissions took too long, or the decoder process failed.
        """
        try:
            return decode(body, None)
        except TooMuchWork:
            pass
        reason = f"earlier large submissions took over {_TURN_S:g} s; send the same groups again"
        async with in_turn(self._turn, _TURN_S, reason):
            outcome = await self._decode_beside(decode, body)
        if isinstance(outcome, Refused):
            raise outcome
        return outcome

    async def _decode_beside(self, decode: Decode, body: RawBody) -> Submission | Refused:
        process = self._process = self._process or _DecodeProcess()
        is_whole = False
        try:
            async with asyncio.timeout(self._decoding_s):
                outcome = await asyncio.to_thread(process.run, decode, body, self.max_bytes)
            is_whole = True
        except TimeoutError as error:
            log.warning("submission_decoder.timed_out", deadline_s=self._decoding_s, hint=_RESTART)
            raise StoreUnavailable(
                f"the submission was not read in {self._decoding_s:g} s; send the groups again"
            ) from error
        except (EOFError, OSError) as error:
            log.warning("submission_decoder.exited", reason=repr(error), hint=_RESTART)
            raise StoreUnavailable(
                "the decoder process exited, perhaps for lack of memory; send the same groups again"
            ) from error
        finally:
            if not is_whole:
                self.close()
        return outcome


class _DecodeProcess:
    """Decodes the bodies that come through a pipe, until the server closes it by exiting."""

    def __init__(self) -> None:
        # A fork would copy the server's sockets and event loop.
        context = multiprocessing.get_context("spawn")
        self._pipe, other_end = context.Pipe()
        self._process = context.Process(target=_decode_for_server, args=(other_end,), daemon=True)
        self._process.start()
        other_end.close()

    def run(self, decode: Decode, body: RawBody, max_bytes: int) -> Submission | Refused:
        """Raises `EOFError` or `OSError` if the process has exited."""
        try:
            # Sent apart from the body: pickling the body would block the event loop up to 30 ms.
            self._pipe.send((decode, body.is_gzip, max_bytes))
            self._pipe.send_bytes(body.content)
            outcome: Submission | Refused = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            raise
        return outcome

    def kill(self) -> None:
        self._process.kill()


def _decode_for_server(pipe: Connection) -> None:
    # Ctrl-C reaches the terminal's whole process group, and the server still needs this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError):
        while True:
            decode, is_gzip, max_bytes = pipe.recv()
            body = RawBody(pipe.recv_bytes(), is_gzip)
            try:
                outcome = decode(body, max_bytes)
            except Refused as error:
                outcome = error
            pipe.send(outcome)
