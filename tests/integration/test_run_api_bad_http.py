"""Mistakes ahead of the body: in queries, paths, headers, and in HTTP itself."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.integration.run_api_calls import (
    ENVIRONMENT,
    group,
    lease,
    register,
    register_environment,
    start,
    submit,
)
from tests.integration.stored_keys import nothing_stored_changes

GROUP = json.dumps(group(9)).encode()
DEADLINE_S = 60.0
BEYOND = "9" * 5000


@pytest.fixture
def started(http: httpx.Client, redis_url: str) -> Iterator[httpx.Client]:
    """A run with a trainer, an environment and a group, of which nothing may change."""
    start(http)
    register_environment(http)
    submit(http, 1)
    with nothing_stored_changes(redis_url, "tests"):
        yield http


def refused(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 422, answer.text
    location: list[str] = answer.json()["detail"][0]["loc"]
    return location


@pytest.mark.parametrize(
    ("method", "path", "location"),
    [
        ("GET", "/batch?trainer={}", ["query", "trainer"]),
        ("GET", "/batch?trainer=1&after={}", ["query", "after"]),
        ("GET", "/batch?wait_s={}", ["query", "wait_s"]),
        ("POST", "/batch/1/ack?trainer={}", ["query", "trainer"]),
        ("POST", "/batch/{}/ack?trainer=1", ["path", "batch_id"]),
    ],
)
def test_values_in_queries_and_paths_are_refused_by_name(
    started: httpx.Client, method: str, path: str, location: list[str]
) -> None:
    for text in ("-1", "nan", "x", "true", "%00", "%ff", str(2**128), BEYOND):
        assert refused(started.request(method, path.format(text))) == location, text[:24]


def test_the_longest_wait_is_a_minute(started: httpx.Client) -> None:
    for text in ("60.1", "inf", "1e400", ""):
        assert refused(started.get(f"/batch?wait_s={text}")) == ["query", "wait_s"]


def test_acknowledging_needs_a_trainer_and_a_batch(started: httpx.Client) -> None:
    assert refused(started.post("/batch/1/ack")) == ["query", "trainer"]
    assert refused(started.post("/batch/0/ack?trainer=1")) == ["path", "batch_id"]


def test_a_batch_that_never_was_is_404_and_another_trainer_409(http: httpx.Client) -> None:
    uuid = register(http).json()["uuid"]
    assert http.post(f"/batch/7/ack?trainer={uuid}").status_code == 404
    assert http.post(f"/batch/7/ack?trainer={uuid + 1}").status_code == 409
    assert lease(http, uuid, after=7).status_code == 409


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/scored_data", group(9)),
        ("/scored_data_list", [group(9)]),
        ("/register-env", ENVIRONMENT),
    ],
    ids=["group", "list", "environment"],
)
def test_idempotency_keys_are_1_to_255_visible_characters(
    started: httpx.Client, path: str, body: Any
) -> None:
    for key in ("", "k" * 256, "two words", "tab\tbed", "é"):
        answer = started.post(path, json=body, headers={"Idempotency-Key": key.encode("latin1")})
        assert refused(answer) == ["header", "idempotency-key"], key


def connection(url: httpx.URL) -> socket.socket:
    return socket.create_connection(("127.0.0.1", url.port), DEADLINE_S)


def talk(url: httpx.URL, sent: bytes, until: bytes | None = None) -> bytes:
    """Everything received before the server closes the connection, or up to `until`."""
    received = b""
    with connection(url) as peer:
        peer.sendall(sent)
        while (until is None or until not in received) and (chunk := peer.recv(65536)):
            received += chunk
    return received


def request(headers: bytes, body: bytes = b"", line: bytes = b"POST /scored_data") -> bytes:
    return line + b" HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n" + body


CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNK = b"%x\r\n%s\r\n0\r\n\r\n" % (len(GROUP), GROUP)
WHOLE = request(b"Content-Length: %d\r\n" % len(GROUP), GROUP)
NO_HTTP = {
    "garbage": b"\x16\x03\x01\x02\x00\x01garbage\r\n\r\n",
    "negative length": request(b"Content-Length: -1\r\n", GROUP),
    "endless length": request(b"Content-Length: " + b"9" * 5000 + b"\r\n", GROUP),
    "two lengths": request(b"Content-Length: 5\r\nContent-Length: 6\r\n", GROUP),
    "length and chunks": request(b"Content-Length: 5\r\n" + CHUNKED, CHUNK),
    "chunks of no length": request(CHUNKED, b"zz\r\n" + GROUP),
    "unknown encoding": request(b"Transfer-Encoding: banana\r\n", CHUNK),
    "NUL in a header": request(b"Idempotency-Key: a\0b\r\n" + CHUNKED, CHUNK),
    "line without end": request(b"", line=b"GET /batch?trainer=" + b"1" * 66_000),
    "length too short": request(b"Content-Length: 10\r\n", GROUP),
    "garbage behind a GET": request(b"", line=b"GET /healthz") + b"GARBAGE\0\r\n\r\n",
    "garbage behind groups": 3 * WHOLE + b"GARBAGE\0\r\n\r\n",
}


@pytest.mark.parametrize("sent", NO_HTTP.values(), ids=NO_HTTP.keys())
def test_bytes_that_are_not_http_are_400_and_the_connection_closed(
    started: httpx.Client, sent: bytes
) -> None:
    received = talk(started.base_url, sent)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1") == 1
    assert 'status="500"' not in started.get("/metrics").text


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(request(CHUNKED, b"3\r\n{{{\r\n0\r\n\r\n"), 422, id="chunked garbage"),
        pytest.param(request(b""), 422, id="no body"),
        pytest.param(request(b"", line=b"GET /status-env"), 422, id="no body of a GET"),
        pytest.param(request(b"Content-Length: 1000000000000000\r\n"), 413, id="declared"),
        pytest.param(
            request(CHUNKED, b"%x\r\n" % 10**8 + b" " * (5 * 1024 * 1024)), 413, id="streamed"
        ),
        pytest.param(
            request(b"Content-Length: 3\r\nExpect: 100-continue\r\n", b"{{{"), 422, id="expected"
        ),
    ],
)
def test_bodies_without_a_plain_length(started: httpx.Client, sent: bytes, status: int) -> None:
    answer = f"HTTP/1.1 {status} ".encode()
    assert answer in talk(started.base_url, sent, until=answer)


@pytest.mark.parametrize(
    "header", [lambda i: b"X-%d: y\r\n" % i, lambda i: b"X: " * (not i) + b"y" * 1000]
)
def test_headers_without_end_are_cut_off(
    started: httpx.Client, header: Callable[[int], bytes]
) -> None:
    endless = b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"".join(map(header, range(100_000)))
    received = b""
    with connection(started.base_url) as peer, suppress(ConnectionError):
        # the server may close, and with that discard its answer, while this is still sending
        peer.sendall(endless)
        received = peer.recv(4096)
    assert not received or received.startswith(b"HTTP/1.1 400 ")


def test_long_headers_that_end_are_read(started: httpx.Client) -> None:
    assert started.get("/healthz", headers={"X": "y" * 60_000}).status_code == 200
