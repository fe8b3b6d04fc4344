"""`Idempotency-Key`: a submission whose answer was lost may be repeated."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.integration.run_api_calls import (
    group,
    next_batch,
    register_environment,
    start,
    status,
)


def post(http: httpx.Client, path: str, body: Any, key: str) -> httpx.Response:
    return http.post(path, json=body, headers={"Idempotency-Key": key})


@pytest.mark.parametrize(
    ("path", "body", "answered"),
    [
        ("/scored_data", group(1), {"status": "received"}),
        ("/scored_data", group(1, size=1, env_id=0), {"status": "buffered", "buffer_size": 1}),
        ("/scored_data_list", [group(1)], {"status": "received", "groups_processed": 1}),
    ],
    ids=["group", "part", "list"],
)
def test_a_repeat_is_answered_alike_and_queued_once(
    http: httpx.Client, path: str, body: Any, answered: Any
) -> None:
    start(http)
    register_environment(http)
    assert post(http, path, body, "key").json() == answered
    once = status(http)
    for _ in range(2):
        assert post(http, path, body, "key").json() == answered
    assert status(http) == once


def test_a_repeat_is_recognised_after_the_batch_was_trained_on(http: httpx.Client) -> None:
    start(http)
    for marker in (1, 2):
        post(http, "/scored_data", group(marker), f"key-{marker}").raise_for_status()
    assert [next_batch(http), next_batch(http)] == [[1, 2], None]
    assert post(http, "/scored_data", group(1), "key-1").json() == {"status": "received"}
    assert status(http) == (1, 0)


def test_a_key_stands_for_one_body_that_was_taken(http: httpx.Client) -> None:
    start(http)
    assert post(http, "/scored_data", group(1, scores=[1.0]), "key").status_code == 422
    assert post(http, "/scored_data", group(1, size=8), "key").status_code == 422
    post(http, "/scored_data", group(1), "key").raise_for_status()  # the key is still unused
    other = post(http, "/scored_data", group(2), "key")
    assert other.status_code == 422
    assert "'key' was used for other groups" in other.json()["detail"]
    assert status(http) == (0, 1)
