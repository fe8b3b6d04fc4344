"""Invalid bodies, queries, headers and HTTP get a 4xx that names the field and changes nothing.

`tests/unit/core/test_wire.py` tests each field of a scored group.
"""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
import redis

from grpo_api.store.redis import layout_prefix
from tests.fixtures.run_api import MAX_BODY_BYTES, RUN_ID
from tests.integration.run_api_calls import ENVIRONMENT, REGISTRATION, ApiClient, group
from tests.support.wait import DEADLINE_S

BODIES: dict[str, Any] = {
    "/register": REGISTRATION,
    "/register-env": ENVIRONMENT,
    "/disconnect-env": {"env_id": 0},
    "/status-env": {"env_id": 0},
    "/scored_data": group(9),
    "/scored_data_list": [group(9)],
}
NAN = float("nan")
PREFIX = layout_prefix(RUN_ID)


def stored(redis_url: str) -> dict[bytes, Any]:
    """Every key of the run with its content, except receipts, reserved ids and refusals."""
    aside = tuple(f"{PREFIX}{name}".encode() for name in ("receipt:", "last_group_id", "refusals"))
    with redis.Redis.from_url(redis_url) as connection:
        read: dict[bytes, Callable[[bytes], Any]] = {
            b"hash": connection.hgetall,
            b"set": connection.smembers,
            b"zset": lambda key: connection.zrange(key, 0, -1, withscores=True),
            b"string": connection.get,
        }
        # not DUMP, because the order of its hash fields changes while Redis resizes the hash
        return {
            key: read[connection.type(key)](key)
            for key in connection.keys(f"{PREFIX}*")
            if not key.startswith(aside)
        }


@pytest.fixture
def started(http: ApiClient, redis_url: str) -> Iterator[ApiClient]:
    """A run with one queued group of two sequences; the tests must not change it."""
    http.start()
    http.register_environment()
    http.submit(1)
    before = stored(redis_url)
    assert len(before) > 10
    yield http
    assert stored(redis_url) == before


def ask(http: ApiClient, path: str, content: bytes, **headers: str) -> httpx.Response:
    method = "GET" if path == "/status-env" else "POST"
    return http.request(method, path, content=content, headers=headers)


def location_of(answer: httpx.Response) -> list[Any]:
    """Place of the first problem in the request."""
    assert answer.status_code == 422, answer.text
    assert len(answer.content) < 100_000
    problem = answer.json()["detail"][0]
    assert problem.keys() == {"loc", "msg", "type"}
    location: list[Any] = problem["loc"]
    return location


def refused(answer: httpx.Response) -> list[Any]:
    """Place of the problem in the body."""
    where, *location = location_of(answer)
    assert where == "body"
    return location


NOT_JSON: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda _: b"",
    "UTF-16": lambda text: text.decode().encode("utf-16"),
    "lone surrogate": lambda text: text[:-1] + b', "x": "\\ud800"}',
    "digits without end": lambda text: text[:-1] + b', "x": %s}' % (b"9" * 5000),
    "lists without end": lambda text: text[:-1] + b', "images": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("path", BODIES)
def test_bodies_that_are_not_json_are_422(started: ApiClient, path: str) -> None:
    for name, spoil in NOT_JSON.items():
        answer = ask(started, path, spoil(json.dumps(BODIES[path]).encode()))
        assert refused(answer) == [], name
        assert "Invalid JSON" in answer.text, name


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/register", "wandb_group", "a\0b"),
        ("/register", "batch_size", 0),
        ("/register-env", "desired_name", "x" * 5000),
        ("/register-env", "weight", NAN),
        ("/register-env", "group_size", 8),
        ("/disconnect-env", "env_id", -1),
        ("/status-env", "env_id", float("inf")),
    ],
)
def test_a_bad_value_is_refused_by_field(
    started: ApiClient, path: str, field: str, value: Any
) -> None:
    content = json.dumps(BODIES[path] | {field: value}).encode()
    assert refused(ask(started, path, content)) == [field]


@pytest.mark.parametrize(
    ("bad", "location"),
    [
        pytest.param(group(9, scores=[0.0, NAN]), ["scores", 1], id="NaN"),
        pytest.param(group(9, images=[{"x": NAN}]), ["images"], id="NaN in a free-form field"),
        pytest.param(group(9, tokens=[[9, 7, 1.5], [9, 7, 91]]), ["tokens", 0, 2], id="fraction"),
        pytest.param(group(9, tokens=[[9, 7], [9, 7, 91]]), [], id="lengths"),
        pytest.param(group(9, size=3), ["tokens"], id="a size that fills no batch"),
        pytest.param(group(9, size=4, env_id=0), ["tokens"], id="more than the environment's size"),
        pytest.param({}, ["tokens"], id="no field"),
        pytest.param([NAN] * 50_000, [], id="a list of NaN"),
    ],
)
def test_a_bad_group_is_refused_by_field_alone_and_in_a_list(
    started: ApiClient, bad: Any, location: list[str | int]
) -> None:
    assert refused(ask(started, "/scored_data", json.dumps(bad).encode())) == location
    in_a_list = json.dumps([group(8), bad]).encode()
    assert refused(ask(started, "/scored_data_list", in_a_list)) == [1, *location]


@pytest.mark.parametrize("path", BODIES)
def test_gzip_is_read_if_it_is_whole_and_within_the_limit(started: ApiClient, path: str) -> None:
    def answered(body: bytes) -> httpx.Response:
        return ask(started, path, body, **{"Content-Encoding": "gzip"})

    assert refused(answered(gzip.compress(b"1"))) == []
    # a body is decompressed once, so gzip inside gzip is not JSON
    bomb = gzip.compress(b" " * (5 * MAX_BODY_BYTES))
    assert refused(answered(gzip.compress(gzip.compress(bomb)))) == []
    assert answered(bomb).status_code == 413
    member = gzip.compress(json.dumps(BODIES[path]).encode())
    for broken in (b"{}", member[:-9], member + b"tail"):
        answer = answered(broken)
        assert answer.status_code == 400, broken
        assert "gzip" in answer.json()["detail"]


BIG_GROUP = json.dumps(group(1, size=4, images="x" * 5000)).encode()
MEMBERS = gzip.compress(BIG_GROUP[:2000]) + gzip.compress(BIG_GROUP[2000:])


@pytest.mark.parametrize(
    ("encoding", "body"), [("gzip", MEMBERS), ("identity, GZip", MEMBERS), ("", BIG_GROUP)]
)
def test_bodies_are_read_in_any_encoding_and_content_type(
    http: ApiClient, encoding: str, body: bytes
) -> None:
    http.start()
    headers = {"Content-Encoding": encoding, "Content-Type": "text/plain"}
    answer = http.post("/scored_data", content=body, headers=headers)
    assert answer.json() == {"status": "received"}
    assert http.next_batch() == [1]


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("deflate, GZIP; q=0.1", "gzip"),
        *[("deflate, br", None), ("gzip;q=0", None), ("gzip; Q=0.000, br", None)],
    ],
)
def test_long_answers_are_gzip_for_who_accepts_it(
    http: ApiClient, accepted: str, encoding: str | None
) -> None:
    http.start()
    http.post("/scored_data", content=BIG_GROUP).raise_for_status()
    for path in ("/latest_example", "/batch"):
        answer = http.get(path, headers={"Accept-Encoding": accepted})
        assert answer.headers.get("content-encoding") == encoding
        assert answer.headers["vary"] == "Accept-Encoding"
        assert "x" * 5000 in answer.text


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
    started: ApiClient, method: str, path: str, location: list[str]
) -> None:
    for text in ("-1", "nan", "x", "%ff", "9" * 5000):
        assert location_of(started.request(method, path.format(text))) == location, text[:24]


def test_a_batch_that_never_was_is_404_and_another_trainer_409(http: ApiClient) -> None:
    uuid = http.register().json()["uuid"]
    assert http.post(f"/batch/7/ack?trainer={uuid}").status_code == 404
    assert http.post(f"/batch/7/ack?trainer={uuid + 1}").status_code == 409
    assert http.lease(uuid, after=7).status_code == 409


def test_idempotency_keys_are_1_to_255_visible_characters(started: ApiClient) -> None:
    for path, body in (("/scored_data", group(9)), ("/register-env", ENVIRONMENT)):
        for key in (b"", b"k" * 256, b"two words", b"\xe9"):
            answer = started.post(path, json=body, headers={"Idempotency-Key": key})
            assert location_of(answer) == ["header", "idempotency-key"], key


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


GROUP = json.dumps(group(9)).encode()
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
    started: ApiClient, sent: bytes
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
def test_bodies_without_a_plain_length(started: ApiClient, sent: bytes, status: int) -> None:
    answer = f"HTTP/1.1 {status} ".encode()
    assert answer in talk(started.base_url, sent, until=answer)


def test_headers_without_end_are_cut_off(started: ApiClient) -> None:
    received = b""
    with suppress(ConnectionError):
        # the server may close the connection during the send, which discards its answer
        received = talk(started.base_url, request(b"X: y\r\n" * 200_000, line=b"GET /healthz"))
    assert not received or received.startswith(b"HTTP/1.1 400 ")
