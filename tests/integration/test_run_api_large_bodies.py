"""Large submissions are decoded in the decoder process, which may hang or die."""

from __future__ import annotations

import asyncio
import fcntl
import gzip
import http.client
import json
import select
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from grpo_api.decode import RawBody, SubmissionDecoder, decode_group
from grpo_api.dispatcher import group_pieces
from grpo_api.errors import StoreUnavailable
from grpo_api.store.payloads import compress, stored
from tests.fixtures.run_api import MAX_BODY_BYTES, RunningApi, start_run_api
from tests.integration.conftest import StartApi
from tests.integration.run_api_calls import ApiClient, group
from tests.support.wait import DEADLINE_S, wait_for_async

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
    async for piece in group_pieces(stored(compress(text), absent=["env_id"])):
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
        with pytest.raises(StoreUnavailable, match=r"within .* s; send the same groups again"):
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
