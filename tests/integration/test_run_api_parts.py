"""Groups whose size differs from the one that their environment registered."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.integration.run_api_calls import (
    group,
    next_batch,
    refused_field,
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


def parts(http: httpx.Client, *sizes: int) -> list[int]:
    """Send parts, marked 1, 2, ...; returns the buffer sizes answered."""
    answers = [send(http, i, size=size, env_id=0) for i, size in enumerate(sizes, start=1)]
    for answer in answers:
        assert answer == {"status": "buffered", "buffer_size": answer["buffer_size"]}
    return [answer["buffer_size"] for answer in answers]


@pytest.mark.parametrize(
    ("sizes", "buffered", "queued"),
    [
        pytest.param([1, 1, 1, 1], [1, 2, 3, 0], [1, 2, 3, 4], id="first in, first out"),
        pytest.param([3, 2, 2], [3, 5, 3], [2, 3], id="any exact subset where that fails"),
        pytest.param([3, 3, 3], [3, 6, 9], [], id="nothing adds up"),
    ],
)
def test_parts_wait_until_they_add_up(
    four: httpx.Client, sizes: list[int], buffered: list[int], queued: list[int]
) -> None:
    assert parts(four, *sizes) == buffered
    assert status(four) == (0, len(queued))
    submit(four, 9, size=8 - 4 * bool(queued))
    assert next_batch(four) == [*queued, 9]


def test_completed_parts_are_served_as_the_groups_they_were_sent_as(four: httpx.Client) -> None:
    parts(four, 3)
    assert four.get("/latest_example").json()["tokens"] == []  # never a part that waits
    parts(four, 1)
    assert four.get("/latest_example").json()["tokens"] == group(1, size=1)["tokens"]
    submit(four, 3, size=4, env_id=0)
    batch = four.get("/batch").json()["batch"]
    expected = [group(1, size=3), group(1, size=1), group(3, size=4)]
    assert [item["tokens"] for item in batch] == [one["tokens"] for one in expected]


def test_groups_of_the_registered_size_overtake_waiting_parts(four: httpx.Client) -> None:
    parts(four, 2)
    submit(four, 8, 9, size=4, env_id=0)
    assert next_batch(four) == [8, 9]


@pytest.mark.parametrize("env_id", [None, 7], ids=["null", "unknown"])
def test_groups_of_a_null_or_unknown_env_id_are_queued(four: httpx.Client, env_id: Any) -> None:
    submit(four, 1, 2, size=2, env_id=env_id)
    assert status(four) == (0, 2)


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


def test_a_group_larger_than_the_registered_size_is_refused_and_its_list_with_it(
    four: httpx.Client,
) -> None:
    large = group(1, size=8, env_id=0)
    answer = send_raw(four, large)
    assert refused_field(answer) == "tokens"
    assert "registered group_size 4" in answer.json()["detail"][0]["msg"]
    answer = send_raw(four, [group(1, size=2, env_id=0), large], "/scored_data_list")
    assert answer.json()["detail"][0]["loc"] == ["body", 1, "tokens"]
    assert parts(four, 1) == [1]  # nothing of the list was buffered


def test_parts_survive_a_trainer_that_registers_again(four: httpx.Client) -> None:
    parts(four, 3)
    start(four, batch_size=8)
    assert parts(four, 1) == [0]
