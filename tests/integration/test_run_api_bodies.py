"""Bodies of submissions: large ones are decoded in a process, which may hang or die; slow ones end,
and all together have a limit."""

from __future__ import annotations

import asyncio
import fcntl
import gzip
import http.client
import json
import re
import select
import socket
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from grpo_api.batches import group_pieces
from grpo_api.decode import RawBody, SubmissionDecoder, decode_group
from grpo_api.errors import StoreUnavailable
from grpo_api.store.payloads import compress, payload_of
from tests.fixtures.run_api import MAX_BODY_BYTES, RunningApi, start_run_api
from tests.integration.conftest import StartApi
from tests.integration.run_api_calls import ApiClient, group
from tests.support.wait import DEADLINE_S, wait_for, wait_for_async

TOKENS = 100_000
"""Tokens per sequence; two sequences are more than 1 MB of JSON, for the decoder process."""
GZIP = {"content-encoding": "gzip"}
DECODING_S = 600.0
BODY = RawBody(json.dumps(group(1)).encode() + b" " * 4_000_000, is_gzip=False)
"""Larger than the buffer of the pipe to the process."""


@pytest.fixture(scope="module")
def api(own_api: StartApi) -> RunningApi:
    return own_api("large")


@pytest.fixture
def large(api: RunningApi) -> Iterator[ApiClient]:
    with ApiClient(base_url=api.url, timeout=DEADLINE_S) as client:
        client.get("/reset_data").raise_for_status()
        client.start()
        yield client


def large_group(**changes: Any) -> dict[str, Any]:
    row = [1234] * TOKENS
    return group(1, tokens=[row, row], masks=[row, row], **changes)


def post(http: ApiClient, body: Any, path: str = "/scored_data") -> httpx.Response:
    return http.post(path, content=gzipped(body), headers=GZIP)


def gzipped(body: Any) -> bytes:
    return gzip.compress(json.dumps(body).encode(), compresslevel=1)


def decode_processes(parent: int | None = None) -> list[psutil.Process]:
    """Child processes of `parent` or of this process, without resource trackers."""
    children = psutil.Process(parent).children()
    return [child for child in children if "spawn_main" in " ".join(command(child))]


def command(process: psutil.Process) -> list[str]:
    """The command line; empty if the process has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # also raised for zombies
        return []


def test_large_groups_and_lists_are_taken_and_refused_like_others(large: ApiClient) -> None:
    assert post(large, large_group()).json() == {"status": "received"}
    assert post(large, [group(2), large_group()], "/scored_data_list").json() == {
        "status": "received",
        "groups_processed": 2,
    }
    assert large.status() == (0, 3)
    (first, second) = large.get("/batch").json()["batch"]
    assert first["tokens"] == large_group()["tokens"]
    assert second["tokens"] == group(2)["tokens"]
    assert set(first) == set(second)
    refused = post(large, large_group(ref_logprobs=[[float("nan")]] * 2))
    assert refused.status_code == 422
    assert refused.json()["detail"][0]["loc"] == ["body", "ref_logprobs", 0, 0]
    assert post(large, " " * MAX_BODY_BYTES).status_code == 413


def test_others_do_not_wait_while_a_large_submission_is_decoded(
    api: RunningApi, large: ApiClient
) -> None:
    post(large, large_group()).raise_for_status()
    (worker,), body = decode_processes(api.process.pid), gzipped(large_group())
    decoding = http.client.HTTPConnection(api.url.removeprefix("http://"), timeout=DEADLINE_S)
    worker.suspend()
    try:
        decoding.request("POST", "/scored_data", body, GZIP)
        # the body arrived before these requests, which are sent later
        large.submit(*range(5))
        assert not select.select([decoding.sock], [], [], 0)[0]
    finally:
        worker.resume()
    assert json.load(decoding.getresponse()) == {"status": "received"}
    decoding.close()
    assert large.status() == (0, 7)


async def test_others_are_served_between_the_pieces_of_a_group() -> None:
    text = json.dumps(large_group()).encode()
    pieces: list[bytes] = []
    turns_of_others: list[int] = []

    async def another() -> None:
        while True:
            turns_of_others.append(len(pieces))
            await asyncio.sleep(0)

    task = asyncio.create_task(another())
    async for piece in group_pieces(payload_of(compress(text), absent=["env_id"])):
        pieces.append(piece)
    task.cancel()
    assert json.loads(b"".join(pieces)) == large_group(env_id=None)
    # also before the first piece, because a thread unpacks the group
    assert set(turns_of_others) >= set(range(len(pieces)))
    assert len(pieces) == -(-len(text) // 262_144)


def test_the_worker_ends_with_a_server_that_is_killed(redis_url: str, tmp_path: Path) -> None:
    api = start_run_api(redis_url, tmp_path, run_id="large-killed")
    httpx.post(f"{api.url}/scored_data", content=b" " * 2_000_000)
    (worker,) = decode_processes(api.process.pid)
    api.process.kill()
    worker.wait(timeout=DEADLINE_S)


@pytest.fixture
def decoder() -> Iterator[SubmissionDecoder]:
    decoder = SubmissionDecoder(8_000_000, decoding_s=DECODING_S)
    yield decoder
    left = decode_processes()
    decoder.close()
    for process in left:
        process.wait(DEADLINE_S)


async def decode(decoder: SubmissionDecoder) -> int:
    """The number of sequences."""
    return sum(item.sequences for item in (await decoder.decode(decode_group, BODY)).groups)


async def hanging_process(decoder: SubmissionDecoder) -> psutil.Process:
    assert await decode(decoder) == 2
    (process,) = decode_processes()
    process.suspend()
    return process


def unread_bytes(decoder: SubmissionDecoder) -> int:
    """Number of bytes in the pipe to the process."""
    assert decoder._process is not None
    unread = fcntl.ioctl(decoder._process._pipe.fileno(), termios.TIOCOUTQ, b"\0" * 4)
    return int.from_bytes(unread, "little")


async def stuck(decoder: SubmissionDecoder) -> asyncio.Task[int]:
    """A submission of which only a part was sent, because the process hangs."""
    task = asyncio.create_task(decode(decoder))
    await wait_for_async(lambda: unread_bytes(decoder) > 0)
    return task


async def test_a_process_that_hangs_is_replaced(
    decoder: SubmissionDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await hanging_process(decoder)
    with monkeypatch.context() as shortened:
        shortened.setattr(decoder, "_decoding_s", 0.1)
        with pytest.raises(StoreUnavailable, match=r"not read in .* s; send the groups again"):
            await decode(decoder)
    assert await decode(decoder) == 2
    await wait_for_async(lambda: not process.is_running())
    assert len(decode_processes()) == 1


async def test_a_process_that_dies_is_replaced(decoder: SubmissionDecoder) -> None:
    process = await hanging_process(decoder)
    hanging = await stuck(decoder)
    process.kill()
    with pytest.raises(StoreUnavailable, match="exited, perhaps for lack of memory"):
        await hanging
    assert await decode(decoder) == 2


async def test_a_cancelled_request_ends_its_process_and_leaves_its_turn(
    decoder: SubmissionDecoder,
) -> None:
    process = await hanging_process(decoder)
    cancelled = await stuck(decoder)
    behind = asyncio.create_task(decode(decoder))
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert await behind == 2
    assert process not in decode_processes()


BODY_DEADLINE_S = 2.0
"""Long enough for the sent bytes to arrive, even on a busy machine."""
SMALL_LIMIT_BYTES = 2 * 1024 * 1024
LARGE = json.dumps(group(9)).encode() + b" " * (SMALL_LIMIT_BYTES - 4096)


@pytest.fixture(scope="module")
def impatient(own_api: StartApi) -> RunningApi:
    return own_api("slow", further={"--body-deadline-s": BODY_DEADLINE_S})


def connection(api: RunningApi) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(api.url.rpartition(":")[2])), DEADLINE_S)


def begin(peer: socket.socket, path: str, length: int, sent: int) -> None:
    """Start a body of `length` bytes, and send `sent` of them."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
    peer.sendall(head.encode() + b" " * sent)


def until_closed(peer: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionResetError):  # if some of the sent bytes are still unread
        while chunk := peer.recv(65536):
            received += chunk
    return received


STOPPED = [("/scored_data", 0), ("/scored_data_list", 200_000), ("/register", 200_000)]


def test_a_body_that_stops_is_408_and_the_connection_closed(impatient: RunningApi) -> None:
    with ExitStack() as opened:
        began = time.monotonic()
        peers = [opened.enter_context(connection(impatient)) for _ in STOPPED]
        for peer, (path, sent) in zip(peers, STOPPED, strict=True):
            begin(peer, path, 300_000, sent)
        answers = [until_closed(peers[0])]
        assert time.monotonic() - began >= BODY_DEADLINE_S
        answers += [until_closed(peer) for peer in peers[1:]]
    for answer, (path, sent) in zip(answers, STOPPED, strict=True):
        assert answer.startswith(b"HTTP/1.1 408 "), path
        assert b"connection: close\r\n" in answer
        arrived = re.search(rb"(\d+) bytes of the body arrived within 2 s", answer)
        assert arrived is not None
        # a suspended server has not read all of them
        assert min(sent, 1) <= int(arrived[1]) <= sent


def test_a_body_that_trickles_is_408_all_the_same(impatient: RunningApi) -> None:
    with connection(impatient) as peer:
        begin(peer, "/scored_data", 100_000, 0)
        peer.setblocking(False)

        def answered_to_another_byte() -> bytes:
            with suppress(ConnectionError):  # already closed after the answer
                peer.send(b" ")
            with suppress(BlockingIOError):
                return peer.recv(65536)
            return b""

        assert wait_for(answered_to_another_byte).startswith(b"HTTP/1.1 408 ")


def status_of(http: ApiClient, body: bytes | Iterator[bytes]) -> int:
    answer = http.post("/scored_data", content=body)
    assert ("Retry-After" in answer.headers) == (answer.status_code == 503)
    return answer.status_code


def chunked(body: bytes) -> Iterator[bytes]:
    """A body without Content-Length."""
    for at in range(0, len(body), 65536):
        yield body[at : at + 65536]


def test_what_bodies_hold_has_a_limit_that_leaves_room_for_small_ones(own_api: StartApi) -> None:
    api = own_api("held", further={"--max-body-bytes": SMALL_LIMIT_BYTES})
    with ApiClient(base_url=api.url, timeout=DEADLINE_S) as http:
        http.start()
        with ExitStack() as stalled:

            def is_full_once_more_have_come() -> bool:
                if {status_of(http, LARGE), status_of(http, chunked(LARGE))} == {503}:
                    return True
                peer = stalled.enter_context(connection(api))
                begin(peer, "/scored_data", SMALL_LIMIT_BYTES, SMALL_LIMIT_BYTES - 1)
                return False

            wait_for(is_full_once_more_have_come)
            before = http.status()
            assert status_of(http, json.dumps(group(1)).encode()) == 200
            assert http.status() == (before[0], before[1] + 1)
        wait_for(lambda: status_of(http, LARGE) == 200)
