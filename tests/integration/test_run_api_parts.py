"""Groups whose size differs from the one that their environment registered."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from grpo_api.placement import MAX_BUFFERED_GROUPS
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


def parts(http: httpx.Client, *sizes: int, env_id: int = 0) -> list[int]:
    """Send parts, marked 1, 2, ...; returns the buffer sizes answered."""
    answers = [send(http, i, size=size, env_id=env_id) for i, size in enumerate(sizes, start=1)]
    assert all(answer.keys() == {"status", "buffer_size"} for answer in answers)
    assert {answer["status"] for answer in answers} == {"buffered"}
    return [answer["buffer_size"] for answer in answers]


def queued_as_it_comes(http: httpx.Client) -> list[int] | None:
    """Markers in the queue, by filling the rest of a batch of 8 with single sequences."""
    while (batch := next_batch(http)) is None:
        submit(http, 99, size=1)
    return [marker for marker in batch if marker != 99]


@pytest.mark.parametrize(
    ("sizes", "buffered", "queued"),
    [
        pytest.param([2, 2], [2, 0], [1, 2], id="FIFO"),
        pytest.param([3, 1], [3, 0], [1, 2], id="parts of 3 + 1"),
        pytest.param([1, 3], [1, 0], [1, 2], id="parts of 1 + 3"),
        pytest.param([1, 1, 1, 1], [1, 2, 3, 0], [1, 2, 3, 4], id="single sequences"),
        pytest.param([3, 2, 2], [3, 5, 3], [2, 3], id="any exact subset where FIFO is none"),
        pytest.param([3, 3, 1], [3, 6, 3], [1, 3], id="the oldest of two that match"),
        pytest.param([2, 3, 1], [2, 5, 2], [2, 3], id="what is left waits on"),
        pytest.param([3, 3, 3], [3, 6, 9], [], id="nothing adds up"),
    ],
)
def test_parts_wait_until_they_add_up(
    four: httpx.Client, sizes: list[int], buffered: list[int], queued: list[int]
) -> None:
    assert parts(four, *sizes) == buffered
    assert status(four) == (0, len(queued))
    assert queued_as_it_comes(four) == queued


def test_completed_parts_are_served_as_the_groups_they_were_sent_as(four: httpx.Client) -> None:
    parts(four, 3, 1)
    submit(four, 3, size=4, env_id=0)
    batch = four.get("/batch").json()["batch"]
    assert [len(item["tokens"]) for item in batch] == [3, 1, 4]
    assert batch[0]["tokens"] == group(1, size=3)["tokens"]


def test_groups_of_the_registered_size_overtake_waiting_parts(four: httpx.Client) -> None:
    parts(four, 2)
    submit(four, 8, 9, size=4, env_id=0)
    assert next_batch(four) == [8, 9]


def test_latest_example_is_a_queued_group_never_a_waiting_part(four: httpx.Client) -> None:
    parts(four, 3)
    assert four.get("/latest_example").json()["tokens"] == []
    parts(four, 1)
    assert four.get("/latest_example").json()["tokens"] == group(1, size=1)["tokens"]


def test_buffers_are_apart(four: httpx.Client) -> None:
    register_environment(four, group_size=4)
    assert parts(four, 2, env_id=0) == [2]
    assert parts(four, 2, env_id=1) == [2]
    assert status(four) == (0, 0)


@pytest.mark.parametrize("env_id", [None, 7], ids=["null", "unknown"])
def test_groups_of_a_null_or_unknown_env_id_are_queued(four: httpx.Client, env_id: Any) -> None:
    submit(four, 1, 2, size=2, env_id=env_id)
    assert status(four) == (0, 2)


def test_a_list_says_how_many_were_buffered_and_what_waits_at_the_end(four: httpx.Client) -> None:
    sizes = [3, 4, 2, 1]
    body = [group(i, size=size, env_id=0) for i, size in enumerate(sizes)]
    assert send_raw(four, body, "/scored_data_list").json() == {
        "status": "received",
        "groups_processed": 4,
        "buffered": 3,
        "last_buffer_size": 2,
    }
    assert status(four) == (0, 3)
    assert next_batch(four) == [1, 0, 3]


def test_a_list_without_parts_does_not_mention_buffers(four: httpx.Client) -> None:
    answer = send_raw(four, [group(1, size=4, env_id=0)], "/scored_data_list").json()
    assert answer == {"status": "received", "groups_processed": 1}


def test_a_group_larger_than_the_registered_size_is_refused(four: httpx.Client) -> None:
    answer = send_raw(four, group(1, size=8, env_id=0))
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", "tokens"]
    assert "registered group_size 4" in answer.json()["detail"][0]["msg"]
    answer = send_raw(
        four, [group(1, size=2, env_id=0), group(2, size=5, env_id=0)], "/scored_data_list"
    )
    assert answer.json()["detail"][0]["loc"] == ["body", 1, "tokens"]
    assert parts(four, 1) == [1]  # nothing of the list was buffered


def test_parts_that_never_match_are_refused_beyond_a_bound(four: httpx.Client) -> None:
    most = MAX_BUFFERED_GROUPS * 4 // 3
    parts(four, *[3] * most)
    answer = send_raw(four, group(1, size=3, env_id=0))
    assert answer.status_code == 409
    assert "parts of 3" in answer.json()["detail"][0]["msg"]
    assert parts(four, 1) == [3 * (most - 1)]
    assert parts(four, 2, 2) == [3 * (most - 1) + 2, 3 * (most - 1)]


def test_parts_survive_a_trainer_that_registers_again(four: httpx.Client) -> None:
    parts(four, 3)
    start(four, batch_size=8)
    assert parts(four, 1) == [0]
