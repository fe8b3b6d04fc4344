"""What is wrong before there is a body to read: queries, paths, headers, and HTTP itself."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.integration.run_api_calls import (
    group,
    register,
    register_environment,
    start,
    submit,
)
from tests.integration.stored_keys import stored_keys

GROUP = json.dumps(group(9)).encode()
DEADLINE_S = 60.0
BEYOND = "9" * 5000


@pytest.fixture
def untouched(http: httpx.Client, redis_url: str) -> Iterator[httpx.Client]:
    """A run with a trainer, an environment and a group, of which nothing may change."""
    start(http)
    register_environment(http)
    submit(http, 1)
    before = stored_keys(redis_url, "tests", without=("receipt:",))
    yield http
    assert stored_keys(redis_url, "tests", without=("receipt:",)) == before


@pytest.mark.parametrize("text", ["-1", "1.5", "nan", "", "x", "true", "%00", "%ff", "٣", BEYOND])
@pytest.mark.parametrize(
    ("method", "path", "location"),
    [
        ("GET", "/batch?trainer={}", ["query", "trainer"]),
        ("GET", "/batch?trainer=1&after={}", ["query", "after"]),
        ("POST", "/batch/1/ack?trainer={}", ["query", "trainer"]),
        ("POST", "/batch/{}/ack?trainer=1", ["path", "batch_id"]),
    ],
)
def test_ids_of_trainers_and_batches(
    untouched: httpx.Client, method: str, path: str, location: list[str], text: str
) -> None:
    if not text and location[0] == "path":
        assert untouched.request(method, path.format(text)).status_code == 404
        return
    answer = untouched.request(method, path.format(text))
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == location


@pytest.mark.parametrize(
    ("query", "location"),
    [
        (f"trainer={2**128}", "trainer"),
        (f"trainer=1&after={2**53}", "after"),
        *((f"trainer=1&wait_s={text}", "wait_s") for text in ("nan", "inf", "-inf", "1e400")),
        *((f"wait_s={text}", "wait_s") for text in ("-0.1", "60.1", "x", "", BEYOND)),
    ],
    ids=lambda value: value[:24],
)
def test_bounds_of_queries(untouched: httpx.Client, query: str, location: str) -> None:
    answer = untouched.get(f"/batch?{query}")
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["query", location]


def test_acknowledging_needs_a_trainer_and_a_batch(http: httpx.Client, redis_url: str) -> None:
    uuid = register(http).json()["uuid"]
    before = stored_keys(redis_url, "tests", without=("receipt:",))
    assert http.post(f"/batch/7/ack?trainer={uuid}").status_code == 404
    assert http.post(f"/batch/7/ack?trainer={uuid + 1}").status_code == 409
    assert http.get(f"/batch?trainer={uuid}&after=7").status_code == 409
    missing = http.post("/batch/1/ack")
    assert missing.json()["detail"][0]["loc"] == ["query", "trainer"]
    below = http.post("/batch/0/ack?trainer=1")
    assert below.json()["detail"][0]["loc"] == ["path", "batch_id"]
    assert stored_keys(redis_url, "tests", without=("receipt:",)) == before


@pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list"])
@pytest.mark.parametrize("key", ["", "k" * 256, "two words", "tab\tbed", "é", "k" * 50_000])
def test_idempotency_keys(untouched: httpx.Client, path: str, key: str) -> None:
    body = [group(9)] if path.endswith("list") else group(9)
    answer = untouched.post(path, json=body, headers={"Idempotency-Key": key.encode("latin1")})
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["header", "idempotency-key"]


def talk(url: str, sent: bytes, until: bytes | None = None) -> bytes:
    """What is answered until the server closes the connection, or `until` that was said."""
    received = b""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), DEADLINE_S) as peer:
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
    "unknown method": request(b"", line=b"FETCH /scored_data"),
    "negative length": request(b"Content-Length: -1\r\n", GROUP),
    "length as text": request(b"Content-Length: ten\r\n", GROUP),
    "endless length": request(b"Content-Length: " + b"9" * 5000 + b"\r\n", GROUP),
    "two lengths": request(b"Content-Length: 5\r\nContent-Length: 6\r\n", GROUP),
    "length and chunks": request(b"Content-Length: 5\r\n" + CHUNKED, CHUNK),
    "chunks of no length": request(CHUNKED, b"zz\r\n" + GROUP),
    "chunks beyond 64 bits": request(CHUNKED, b"f" * 17 + b"\r\n" + GROUP),
    "unknown encoding": request(b"Transfer-Encoding: banana\r\n", CHUNK),
    "NUL in a header": request(b"Idempotency-Key: a\0b\r\n" + CHUNKED, CHUNK),
    "folded header": request(b"Idempotency-Key: a\r\n b\r\n" + CHUNKED, CHUNK),
    "line of no end": request(b"", line=b"GET /batch?trainer=" + b"1" * 66_000),
    "length too short": request(b"Content-Length: 10\r\n", GROUP),
    "garbage behind a GET": request(b"", line=b"GET /healthz") + b"GARBAGE\0\r\n\r\n",
    "garbage behind a group": WHOLE + b"GARBAGE\0\r\n\r\n",
    "garbage behind groups": 3 * WHOLE + b"GARBAGE\0\r\n\r\n",
}


@pytest.mark.parametrize("sent", NO_HTTP.values(), ids=NO_HTTP.keys())
def test_what_is_not_http_is_400_and_the_connection_closed(
    untouched: httpx.Client, sent: bytes
) -> None:
    received = talk(str(untouched.base_url).rstrip("/"), sent)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1") == 1
    assert 'status="500"' not in untouched.get("/metrics").text


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (request(CHUNKED, b"3\r\n{{{\r\n0\r\n\r\n"), 422),
        (request(b""), 422),
        (request(b"", line=b"GET /status-env"), 422),
        (request(b"Content-Length: 1000000000000000\r\n"), 413),
        (request(CHUNKED, b"%x\r\n" % 10**8 + b" " * (5 * 1024 * 1024)), 413),
        (request(b"Content-Length: 3\r\nExpect: 100-continue\r\n", b"{{{"), 422),
    ],
    ids=["chunked garbage", "no body", "no body of a GET", "declared", "streamed", "expected"],
)
def test_bodies_without_a_plain_length(untouched: httpx.Client, sent: bytes, status: int) -> None:
    answer = f"HTTP/1.1 {status} ".encode()
    assert answer in talk(str(untouched.base_url).rstrip("/"), sent, until=answer)


@pytest.mark.parametrize(
    "header", [lambda i: b"X-%d: y\r\n" % i, lambda i: b"X: " * (not i) + b"y" * 1000]
)
def test_headers_without_end_are_cut_off(
    untouched: httpx.Client, header: Callable[[int], bytes]
) -> None:
    endless = b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"".join(map(header, range(100_000)))
    received = b""
    port = int(str(untouched.base_url).rstrip("/").rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as peer:
        try:
            peer.sendall(endless)
            received = peer.recv(4096)
        except ConnectionError:
            return  # closed while this was still sending
    assert received.startswith(b"HTTP/1.1 400 ")


def test_long_headers_that_end_are_read(untouched: httpx.Client) -> None:
    assert untouched.get("/healthz", headers={"X": "y" * 60_000}).status_code == 200
