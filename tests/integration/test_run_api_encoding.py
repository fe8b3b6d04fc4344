"""Bodies and answers on the wire: JSON, and gzip in both directions."""

from __future__ import annotations

import gzip
import json

import httpx
import pytest

from tests.fixtures.run_api import MAX_BODY_BYTES
from tests.integration.run_api_calls import group, next_batch, start, status, submit

BIG_GROUP = json.dumps(group(1, size=4, images="x" * 5000)).encode()


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip", "identity, Gzip"])
@pytest.mark.parametrize("members", [1, 3])
def test_gzip_bodies_in_any_case_and_any_number_of_members(
    http: httpx.Client, encoding: str, members: int
) -> None:
    start(http)
    cut = len(BIG_GROUP) // members + 1
    body = b"".join(gzip.compress(BIG_GROUP[i : i + cut]) for i in range(0, len(BIG_GROUP), cut))
    answer = http.post("/scored_data", content=body, headers={"Content-Encoding": encoding})
    assert answer.json() == {"status": "received"}
    assert next_batch(http) == [1]


@pytest.mark.parametrize(
    "path", ["/register", "/register-env", "/disconnect-env", "/scored_data_list"]
)
def test_every_route_takes_gzip(http: httpx.Client, path: str) -> None:
    start(http)
    body = gzip.compress(b"null")
    answer = http.post(path, content=body, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body"]


@pytest.mark.parametrize(
    "body",
    [b"not gzip", gzip.compress(BIG_GROUP)[:-9], gzip.compress(BIG_GROUP) + b"tail"],
    ids=["plain", "truncated", "trailing garbage"],
)
def test_what_is_not_gzip_is_400(http: httpx.Client, body: bytes) -> None:
    start(http)
    answer = http.post("/scored_data", content=body, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 400
    assert "gzip" in answer.json()["detail"]
    assert status(http) == (0, 0)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (gzip.compress(b"[" + b" " * (50 * MAX_BODY_BYTES)), {"Content-Encoding": "gzip"}),
        (b"[" + b" " * MAX_BODY_BYTES, {}),
    ],
    ids=["bomb", "plain"],
)
def test_body_over_the_limit_is_413(
    http: httpx.Client, body: bytes, headers: dict[str, str]
) -> None:
    start(http)
    answer = http.post("/scored_data_list", content=body, headers=headers)
    assert answer.status_code == 413
    assert str(MAX_BODY_BYTES) in answer.json()["detail"]
    assert status(http) == (0, 0)


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/json; charset=utf-8"])
def test_bodies_are_json_whatever_they_are_called(
    http: httpx.Client, content_type: str | None
) -> None:
    start(http)
    headers = {"Content-Type": content_type} if content_type else {}
    assert http.post("/scored_data", content=BIG_GROUP, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip", "gzip"),
        ("gzip, deflate, br", "gzip"),
        ("GZIP", "gzip"),
        ("deflate;q=0.5, gzip;q=0.1", "gzip"),
        ("*", "gzip"),
        ("identity", None),
        ("deflate, br", None),
        ("gzip;q=0", None),
        ("gzip; q=0.0, deflate", None),
        ("", None),
    ],
)
def test_long_answers_are_gzip_for_who_accepts_it(
    http: httpx.Client, accepted: str, encoding: str | None
) -> None:
    start(http)
    http.post("/scored_data", content=BIG_GROUP).raise_for_status()
    answer = http.get("/batch", headers={"Accept-Encoding": accepted})
    assert answer.headers.get("content-encoding") == encoding
    assert answer.json()["batch"][0]["images"] == "x" * 5000


def test_answers_are_gzip_beyond_1000_bytes_only(http: httpx.Client) -> None:
    start(http)
    encodings = {}
    for length in (100, 990, 2000):
        submit(http, 1, images="x" * length)
        answer = http.get("/latest_example", headers={"Accept-Encoding": "gzip"})
        encodings[len(answer.content) > 1000] = answer.headers.get("content-encoding")
    assert encodings == {False: None, True: "gzip"}


def test_no_origin_is_given_credentials(http: httpx.Client) -> None:
    answer = http.get("/status", headers={"Origin": "http://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
