"""`/batch` returns exact batches, oldest first, with every minimum; parts wait in a buffer.

`tests/unit/api/planning` tests the planning itself.
"""

from __future__ import annotations

import httpx
import pytest

from tests.integration.run_api_calls import (
    disconnect,
    group,
    next_batch,
    register_environment,
    send,
    send_raw,
    start,
    status,
    submit,
)


def test_batches_are_exact_oldest_first_and_count_as_steps_once_delivered(
    http: httpx.Client,
) -> None:
    start(http)
    submit(http, *range(7))
    assert status(http) == (0, 7)
    assert next_batch(http) == [0, 1]
    assert status(http) == (1, 5)
    assert [next_batch(http) for _ in range(3)] == [[2, 3], [4, 5], None]
    assert status(http) == (3, 1)


def environments(http: httpx.Client, *minimums: float | None) -> None:
    """Environments 0, 1, ... with groups of 2 and batches of 8."""
    start(http, batch_size=8)
    for minimum in minimums:
        register_environment(http, min_batch_allocation=minimum)


def test_a_batch_is_the_oldest_that_holds_every_minimum(http: httpx.Client) -> None:
    environments(http, 0.25, 0.5, None)
    submit(http, 21, 22, 23, 24, env_id=2)
    submit(http, 11, 12, 13, env_id=1)
    assert next_batch(http) is None
    send(http, 1, size=1, env_id=0)
    assert next_batch(http) is None
    send(http, 2, size=1, env_id=0)  # its parts add up to a group now
    assert next_batch(http) == [21, 11, 12, 1, 2]


def test_a_minimum_holds_batches_back_until_its_environment_disconnects(http: httpx.Client) -> None:
    environments(http, None, 0.25)
    submit(http, 1, 2, 3, 4, env_id=0)
    assert next_batch(http) is None
    disconnect(http, 1)
    assert next_batch(http) == [1, 2, 3, 4]


@pytest.fixture
def four(http: httpx.Client) -> httpx.Client:
    """A run with batches of 8; environment 0 registered groups of 4."""
    start(http, batch_size=8)
    register_environment(http, group_size=4)
    return http


def test_parts_wait_until_they_add_up_and_are_served_as_they_were_sent(four: httpx.Client) -> None:
    for marker, (size, waiting) in enumerate([(3, 3), (2, 5)]):
        answer = send(four, marker, size=size, env_id=0)
        assert answer == {"status": "buffered", "buffer_size": waiting}
    assert four.get("/latest_example").json()["tokens"] == []  # never a buffered part
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
