"""Invalid queries, paths, headers and invalid HTTP are answered with 4xx."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress

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
from tests.support.wait import DEADLINE_S

GROUP = json.dumps(group(9)).encode()


@pytest.fixture
def started(http: httpx.Client, redis_url: str) -> Iterator[httpx.Client]:
    """A run with a trainer, an environment and a group; the tests must not change it."""
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
    for text in ("-1", "nan", "x", "%ff", "9" * 5000):
        assert refused(started.request(method, path.format(text))) == location, text[:24]


def test_a_batch_that_never_was_is_404_and_another_trainer_409(http: httpx.Client) -> None:
    uuid = register(http).json()["uuid"]
    assert http.post(f"/batch/7/ack?trainer={uuid}").status_code == 404
    assert http.post(f"/batch/7/ack?trainer={uuid + 1}").status_code == 409
    assert lease(http, uuid, after=7).status_code == 409


def test_idempotency_keys_are_1_to_255_visible_characters(started: httpx.Client) -> None:
    for path, body in (("/scored_data", group(9)), ("/register-env", ENVIRONMENT)):
        for key in (b"", b"k" * 256, b"two words", b"\xe9"):
            answer = started.post(path, json=body, headers={"Idempotency-Key": key})
            assert refused(answer) == ["header", "idempotency-key"], key


def talk(url: httpx.URL, sent: bytes, until: bytes | None = None) -> bytes:
    """All bytes until the server closes the connection, or up to `until`."""
    received = b""
    with socket.create_connection(("127.0.0.1", url.port), DEADLINE_S) as peer:
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
    "length and chunks": request(b"Content-Length: 5\r\n" + CHUNKED, CHUNK),
    "line without end": request(b"", line=b"GET /batch?trainer=" + b"1" * 66_000),
    "length too short": request(b"Content-Length: 10\r\n", GROUP),
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
        pytest.param(request(b"", line=b"GET /status-env"), 422, id="no body of a GET"),
        pytest.param(request(b"Content-Length: 1000000000000000\r\n"), 413, id="declared"),
        pytest.param(
            request(CHUNKED, b"%x\r\n" % 10**8 + b" " * (5 * 1024 * 1024)), 413, id="streamed"
        ),
    ],
)
def test_bodies_without_a_plain_length(started: httpx.Client, sent: bytes, status: int) -> None:
    answer = f"HTTP/1.1 {status} ".encode()
    assert answer in talk(started.base_url, sent, until=answer)


def test_headers_without_end_are_cut_off(started: httpx.Client) -> None:
    received = b""
    with suppress(ConnectionError):
        # the server may close the connection during the send, which discards its answer
        received = talk(started.base_url, request(b"X: y\r\n" * 200_000, line=b"GET /healthz"))
    assert not received or received.startswith(b"HTTP/1.1 400 ")
