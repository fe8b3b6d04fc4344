"""Nothing a client sends gives a 5xx or leaves a trace."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest

from tests.fixtures.run_api import MAX_BODY_BYTES
from tests.integration.run_api_calls import (
    group,
    next_batch,
    register_environment,
    start,
    status,
    submit,
)

BIG_GROUP = json.dumps(group(1, size=4, images="x" * 5000)).encode()


@pytest.fixture
def started(http: httpx.Client) -> httpx.Client:
    """One group of two sequences is queued; a batch holds four."""
    start(http)
    register_environment(http)
    submit(http, 1)
    return http


def assert_unchanged(http: httpx.Client) -> None:
    assert status(http) == (0, 1)
    submit(http, 2)
    assert next_batch(http) == [1, 2]


@pytest.mark.parametrize(
    ("bad", "location"),
    [
        (group(9, scores=[0.0, float("nan")]), ["scores", 1]),
        (group(9, scores=[float("inf"), 0.0]), ["scores", 0]),
        (group(9, group_overrides={"x": float("nan")}), ["group_overrides"]),
        (group(9, tokens=[[9, 7, 1.5], [9, 7, 91]]), ["tokens", 0, 2]),
        (group(9, tokens=[[9, 7], [9, 7, 91]]), []),
        (group(9, tokens=[], masks=[], scores=[]), []),
        (group(9, env_id=-1), ["env_id"]),
        (group(9, env_id=10**40), ["env_id"]),
        (group(9, size=3), ["tokens"]),
        (group(9, size=8), ["tokens"]),
        (group(9, size=4, env_id=0), ["tokens"]),
        ({}, ["tokens"]),
        ([], []),
        (None, []),
    ],
)
def test_bad_group_is_refused_by_name(
    started: httpx.Client, bad: Any, location: list[str | int]
) -> None:
    answer = started.post("/scored_data", content=json.dumps(bad))
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", *location]

    # nothing of a list is queued where one item is bad
    answer = started.post("/scored_data_list", content=json.dumps([group(8), bad]))
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", 1, *location]
    assert_unchanged(started)


def test_reason_says_why_it_can_never_be_served(started: httpx.Client) -> None:
    indivisible = started.post("/scored_data", json=group(9, size=3)).json()["detail"][0]["msg"]
    assert "3" in indivisible
    assert "exactly 4" in indivisible
    mixed = started.post("/scored_data", json=group(9, size=4, env_id=0)).json()["detail"][0]["msg"]
    assert "group_size 2" in mixed
    assert "not supported yet" in mixed


@pytest.mark.parametrize(
    "path", ["/scored_data", "/scored_data_list", "/register", "/register-env"]
)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"images":' + b"[" * 100_000,
        b'{"tokens": ' + b"9" * 10_000 + b"}",
        b'{"desired_name": "\\ud800", "wandb_group": "\\ud800"}',
        b"NaN",
        b'{"weight": NaN, "scores": [NaN]}',
        b"[" + b"NaN," * 50_000 + b"NaN]",
        b'{"' + b"k" * 100_000 + b'": 1}',
    ],
    ids=lambda body: body[:12].decode("latin1"),
)
def test_garbage_is_a_client_error(started: httpx.Client, path: str, body: bytes) -> None:
    answer = started.post(path, content=body)
    assert answer.status_code == 422
    assert answer.json()["detail"][0].keys() == {"loc", "msg", "type"}
    assert len(answer.content) < 100_000
    assert_unchanged(started)


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip"])
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
    "body",
    [b"not gzip", gzip.compress(BIG_GROUP)[:-9], gzip.compress(BIG_GROUP) + b"tail"],
    ids=["plain", "truncated", "trailing garbage"],
)
def test_what_is_not_gzip_is_400(started: httpx.Client, body: bytes) -> None:
    answer = started.post("/scored_data", content=body, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 400
    assert "gzip" in answer.json()["detail"]
    assert_unchanged(started)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (gzip.compress(b"[" + b" " * (50 * MAX_BODY_BYTES)), {"Content-Encoding": "gzip"}),
        (b"[" + b" " * MAX_BODY_BYTES, {}),
    ],
    ids=["bomb", "plain"],
)
def test_body_over_the_limit_is_413(
    started: httpx.Client, body: bytes, headers: dict[str, str]
) -> None:
    answer = started.post("/scored_data_list", content=body, headers=headers)
    assert answer.status_code == 413
    assert str(MAX_BODY_BYTES) in answer.json()["detail"]
    assert_unchanged(started)


@pytest.mark.parametrize(("accepted", "encoding"), [("gzip", "gzip"), ("identity", None)])
def test_long_answers_are_gzip_for_who_accepts_it(
    http: httpx.Client, accepted: str, encoding: str | None
) -> None:
    start(http)
    http.post("/scored_data", content=BIG_GROUP).raise_for_status()
    answer = http.get("/batch", headers={"Accept-Encoding": accepted})
    assert answer.headers.get("content-encoding") == encoding
    assert answer.json()["batch"][0]["images"] == "x" * 5000


def test_no_origin_is_given_credentials(http: httpx.Client) -> None:
    answer = http.get("/status", headers={"Origin": "http://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
