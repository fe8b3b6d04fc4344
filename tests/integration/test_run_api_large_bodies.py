"""Large submissions are decoded beside the server: nobody else waits for them."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from grpo_api.batch_answer import group_pieces
from grpo_api.payloads import compress, stored
from tests.fixtures.run_api import MAX_BODY_BYTES, RunningApi, start_run_api
from tests.integration.decode_processes import decode_processes
from tests.integration.run_api_calls import group, start, status, submit

TOKENS = 100_000
"""In each of two sequences: more than a megabyte of JSON, decoded beside the server."""
GZIP = {"content-encoding": "gzip"}


@pytest.fixture(scope="module")
def api(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApi]:
    started = start_run_api(redis_url, tmp_path_factory.mktemp("large"), run_id="large")
    yield started
    started.process.stop()


@pytest.fixture
def large(api: RunningApi) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api.url, timeout=60.0) as client:
        client.get("/reset_data").raise_for_status()
        start(client)
        yield client


def large_group(**changes: Any) -> dict[str, Any]:
    row = [1234] * TOKENS
    return group(1, tokens=[row, row], masks=[row, row], **changes)


def post(http: httpx.Client, body: Any, path: str = "/scored_data") -> httpx.Response:
    return http.post(path, content=gzipped(body), headers=GZIP)


def gzipped(body: Any) -> bytes:
    return gzip.compress(json.dumps(body).encode(), compresslevel=1)


def worker_of(api: RunningApi) -> psutil.Process:
    (worker,) = decode_processes(psutil.Process(api.process.pid))
    return worker


def test_large_groups_and_lists_are_taken_like_others(large: httpx.Client) -> None:
    assert post(large, large_group()).json() == {"status": "received"}
    assert post(large, [group(2), large_group()], "/scored_data_list").json() == {
        "status": "received",
        "groups_processed": 2,
    }
    assert status(large) == (0, 3)
    (first, second) = large.get("/batch").json()["batch"]
    assert first["tokens"] == large_group()["tokens"]
    assert second["tokens"] == group(2)["tokens"]
    assert set(first) == set(second)


def test_large_groups_are_refused_like_others(large: httpx.Client) -> None:
    refused = post(large, large_group(ref_logprobs=[[float("nan")]] * 2))
    assert refused.status_code == 422
    assert refused.json()["detail"][0]["loc"] == ["body", "ref_logprobs", 0, 0]
    assert post(large, " " * MAX_BODY_BYTES).status_code == 413
    assert status(large) == (0, 0)


def test_others_do_not_wait_while_a_large_submission_is_decoded(
    api: RunningApi, large: httpx.Client
) -> None:
    post(large, large_group()).raise_for_status()
    worker, body = worker_of(api), gzipped(large_group())
    decoding = http.client.HTTPConnection(api.url.removeprefix("http://"), timeout=60.0)
    worker.suspend()
    try:
        decoding.request("POST", "/scored_data", body, GZIP)
        # it has arrived before these, which are sent later
        submit(large, *range(5))
        assert not select.select([decoding.sock], [], [], 0)[0]
    finally:
        worker.resume()
    assert json.load(decoding.getresponse()) == {"status": "received"}
    decoding.close()
    assert status(large) == (0, 7)


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
def test_a_large_latest_example_is_sent_in_pieces(large: httpx.Client, encoding: str) -> None:
    post(large, large_group()).raise_for_status()
    answer = large.get("/latest_example", headers={"Accept-Encoding": encoding})
    assert answer.json()["tokens"] == large_group()["tokens"]
    assert answer.headers.get("Content-Encoding", "identity") == encoding
    assert answer.headers["Vary"] == "Accept-Encoding"
    assert "Content-Length" not in answer.headers


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
    # before the first piece as well: it is unpacked elsewhere
    assert set(turns_of_others) >= set(range(len(pieces)))
    assert len(pieces) == -(-len(text) // 262_144)


def test_the_worker_ends_with_a_server_that_is_killed(redis_url: str, tmp_path: Path) -> None:
    api = start_run_api(redis_url, tmp_path, run_id="large-killed")
    httpx.post(f"{api.url}/scored_data", content=b" " * 2_000_000)
    worker = worker_of(api)
    api.process.kill()
    worker.wait(timeout=60)
