"""Groups are queued, buffered or refused as a whole; `/batch` returns exact batches, oldest first.

`tests/unit/api` tests the planning itself, `test_run_store_large` how groups wait.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.integration.conftest import StartApi
from tests.integration.run_api_calls import ApiClient, group
from tests.support.wait import DEADLINE_S


@pytest.fixture
def four(http: ApiClient) -> ApiClient:
    """A run with batches of 8; environment 0 registered groups of 4."""
    http.start(batch_size=8)
    http.register_environment(group_size=4)
    return http


def test_parts_wait_until_they_add_up_and_are_served_as_they_were_sent(four: ApiClient) -> None:
    for marker, (size, waiting) in enumerate([(3, 3), (2, 5)]):
        answer = four.send_group(marker, size=size, env_id=0)
        assert answer == {"status": "buffered", "buffer_size": waiting}
    assert four.get("/latest_example").json()["tokens"] == []  # never a buffered part
    assert four.send_group(2, size=2, env_id=0) == {"status": "buffered", "buffer_size": 3}
    assert four.get("/latest_example").json()["tokens"] == group(2)["tokens"]
    four.submit(3, size=4, env_id=None)
    batch = four.get("/batch").json()["batch"]
    assert [item["tokens"] for item in batch] == [
        group(marker, size=size)["tokens"] for marker, size in ((1, 2), (2, 2), (3, 4))
    ]


def test_a_list_says_how_many_were_buffered_and_what_waits_at_the_end(four: ApiClient) -> None:
    body = [group(i, size=size, env_id=0) for i, size in enumerate([3, 4, 2, 1])]
    assert four.send_raw(body, "/scored_data_list").json() == {
        "status": "received",
        "groups_processed": 4,
        "buffered": 3,
        "last_buffer_size": 2,
    }
    assert four.status() == (0, 3)
    assert four.next_batch() == [1, 0, 3]


def post(http: ApiClient, path: str, body: Any, key: str) -> httpx.Response:
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
    http: ApiClient, path: str, body: Any, answered: Any
) -> None:
    http.start()
    http.register_environment()
    assert post(http, path, body, "key").json() == answered
    once = http.status()
    for _ in range(2):
        assert post(http, path, body, "key").json() == answered
    assert http.status() == once


def test_a_key_stands_for_one_body_that_was_taken(http: ApiClient) -> None:
    http.start()
    assert post(http, "/scored_data", group(1, scores=[1.0]), "key").status_code == 422
    assert post(http, "/scored_data", group(1, size=8), "key").status_code == 422
    post(http, "/scored_data", group(1), "key").raise_for_status()  # the key is still unused
    other = post(http, "/scored_data", group(2), "key")
    assert other.status_code == 422
    assert "'key' was used for other groups" in other.json()["detail"]
    assert http.status() == (0, 1)


def test_a_queue_that_stays_full_is_a_503_and_nothing_is_queued(own_api: StartApi) -> None:
    api = own_api("limited", further={"--max-queued-groups": 4, "--full-queue-wait-s": 0.5})
    with ApiClient(base_url=api.url, timeout=DEADLINE_S) as limited:
        limited.get("/reset_data").raise_for_status()
        limited.start()
        limited.register_environment()
        for markers, pressure in ((range(3), 0.5), (range(1), 1.0)):
            limited.submit(*markers, env_id=0)
            assert limited.told(0)["pressure"] == pressure
        answer = limited.post("/scored_data", json=group(8))
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert "queue has been full" in answer.json()["detail"]
        assert limited.status() == (0, 4)
        # a limit below one batch does not stop the run
        limited.get("/reset_data").raise_for_status()
        limited.start(batch_size=16)
        limited.submit(*range(8))
        assert limited.next_batch() == list(range(8))
