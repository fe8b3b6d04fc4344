"""Groups smaller than their environment registered wait. Which: `unit/api/test_placement`."""

from __future__ import annotations

import httpx
import pytest

from tests.integration.run_api_calls import (
    group,
    next_batch,
    register_environment,
    send,
    send_raw,
    start,
    status,
    submit,
)


@pytest.fixture
def four(http: httpx.Client) -> httpx.Client:
    """Environment 0 registered groups of 4; a batch holds 8."""
    start(http, batch_size=8)
    register_environment(http, group_size=4)
    return http


def test_parts_wait_until_they_add_up_and_are_served_as_they_were_sent(four: httpx.Client) -> None:
    for marker, (size, waiting) in enumerate([(3, 3), (2, 5)]):
        answer = send(four, marker, size=size, env_id=0)
        assert answer == {"status": "buffered", "buffer_size": waiting}
    assert four.get("/latest_example").json()["tokens"] == []  # never a part that waits
    assert send(four, 2, size=2, env_id=0) == {"status": "buffered", "buffer_size": 3}
    assert four.get("/latest_example").json()["tokens"] == group(2)["tokens"]
    submit(four, 3, size=4, env_id=None)
    batch = four.get("/batch").json()["batch"]
    assert [item["tokens"] for item in batch] == [
        group(marker, size=size)["tokens"] for marker, size in ((1, 2), (2, 2), (3, 4))
    ]


def test_a_list_says_how_many_were_buffered_and_what_waits_at_the_end(four: httpx.Client) -> None:
    body = [group(i, size=size, env_id=0) for i, size in enumerate([3, 4, 2, 1])]
    assert send_raw(four, body, "/scored_data_list").json() == {
        "status": "received",
        "groups_processed": 4,
        "buffered": 3,
        "last_buffer_size": 2,
    }
    assert status(four) == (0, 3)
    assert next_batch(four) == [1, 0, 3]


def test_nothing_of_a_list_with_a_group_larger_than_registered_is_buffered(
    four: httpx.Client,
) -> None:
    body = [group(1, size=2, env_id=0), group(2, size=8, env_id=0)]
    answer = send_raw(four, body, "/scored_data_list")
    assert answer.json()["detail"][0]["loc"] == ["body", 1, "tokens"]
    assert "registered group_size 4" in answer.json()["detail"][0]["msg"]
    assert send(four, 1, size=1, env_id=0)["buffer_size"] == 1
