"""Nothing a client sends gives a 5xx or leaves a trace."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.integration.run_api_calls import (
    group,
    next_batch,
    register_environment,
    start,
    status,
    submit,
)


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
