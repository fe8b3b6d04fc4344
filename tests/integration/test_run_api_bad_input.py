"""An invalid body gets a 4xx that names the field and changes nothing. Bodies may be gzip-encoded.

`tests/unit/core/test_wire.py` tests each field of a scored group.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.fixtures.run_api import MAX_BODY_BYTES
from tests.integration.run_api_calls import (
    ENVIRONMENT,
    REGISTRATION,
    group,
    next_batch,
    register_environment,
    start,
    submit,
)
from tests.integration.stored_keys import nothing_stored_changes

BODIES: dict[str, Any] = {
    "/register": REGISTRATION,
    "/register-env": ENVIRONMENT,
    "/disconnect-env": {"env_id": 0},
    "/status-env": {"env_id": 0},
    "/scored_data": group(9),
    "/scored_data_list": [group(9)],
}
NAN = float("nan")


@pytest.fixture
def started(http: httpx.Client, redis_url: str) -> Iterator[httpx.Client]:
    """A run with one queued group of two sequences; the tests must not change it."""
    start(http)
    register_environment(http)
    submit(http, 1)
    with nothing_stored_changes(redis_url, "tests"):
        yield http


def ask(http: httpx.Client, path: str, content: bytes, **headers: str) -> httpx.Response:
    method = "GET" if path == "/status-env" else "POST"
    return http.request(method, path, content=content, headers=headers)


def refused(answer: httpx.Response) -> list[Any]:
    """Place of the problem in the body."""
    assert answer.status_code == 422, answer.text
    assert len(answer.content) < 100_000
    problem = answer.json()["detail"][0]
    assert problem.keys() == {"loc", "msg", "type"}
    assert problem["loc"][0] == "body"
    location: list[Any] = problem["loc"][1:]
    return location


NOT_JSON: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda _: b"",
    "UTF-16": lambda text: text.decode().encode("utf-16"),
    "lone surrogate": lambda text: text[:-1] + b', "x": "\\ud800"}',
    "digits without end": lambda text: text[:-1] + b', "x": %s}' % (b"9" * 5000),
    "lists without end": lambda text: text[:-1] + b', "images": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("path", BODIES)
def test_bodies_that_are_not_json_are_422(started: httpx.Client, path: str) -> None:
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
        ("/disconnect-env", "env_id", -1),
        ("/status-env", "env_id", float("inf")),
    ],
)
def test_a_bad_value_is_refused_by_field(
    started: httpx.Client, path: str, field: str, value: Any
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
    started: httpx.Client, bad: Any, location: list[str | int]
) -> None:
    assert refused(ask(started, "/scored_data", json.dumps(bad).encode())) == location
    in_a_list = json.dumps([group(8), bad]).encode()
    assert refused(ask(started, "/scored_data_list", in_a_list)) == [1, *location]


@pytest.mark.parametrize("path", BODIES)
def test_gzip_is_read_if_it_is_whole_and_within_the_limit(started: httpx.Client, path: str) -> None:
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


def test_a_body_over_the_limit_is_413(started: httpx.Client) -> None:
    answer = ask(started, "/scored_data_list", b"[" + b" " * MAX_BODY_BYTES)
    assert answer.status_code == 413
    assert str(MAX_BODY_BYTES) in answer.json()["detail"]


BIG_GROUP = json.dumps(group(1, size=4, images="x" * 5000)).encode()
MEMBERS = gzip.compress(BIG_GROUP[:2000]) + gzip.compress(BIG_GROUP[2000:])


@pytest.mark.parametrize(
    ("encoding", "body"), [("gzip", MEMBERS), ("identity, GZip", MEMBERS), ("", BIG_GROUP)]
)
def test_bodies_are_read_in_any_encoding_and_content_type(
    http: httpx.Client, encoding: str, body: bytes
) -> None:
    start(http)
    headers = {"Content-Encoding": encoding, "Content-Type": "text/plain"}
    answer = http.post("/scored_data", content=body, headers=headers)
    assert answer.json() == {"status": "received"}
    assert next_batch(http) == [1]


@pytest.mark.parametrize(
    ("accepted", "encoding"), [("deflate, gzip;q=0.1", "gzip"), ("deflate, br", None)]
)
def test_long_answers_are_gzip_for_who_accepts_it(
    http: httpx.Client, accepted: str, encoding: str | None
) -> None:
    start(http)
    http.post("/scored_data", content=BIG_GROUP).raise_for_status()
    for path in ("/latest_example", "/batch"):
        answer = http.get(path, headers={"Accept-Encoding": accepted})
        assert answer.headers.get("content-encoding") == encoding
        assert answer.headers["vary"] == "Accept-Encoding"
        assert "x" * 5000 in answer.text
