"""`/batch`: exact, oldest first, and never a stall where a batch can be formed."""

from __future__ import annotations

import httpx
import pytest

from tests.integration.run_api_calls import (
    disconnect,
    group,
    next_batch,
    register,
    register_environment,
    send_raw,
    start,
    status,
    submit,
    told,
)


def test_without_a_trainer_a_batch_is_an_error_with_status_200(http: httpx.Client) -> None:
    answer = http.get("/batch")
    assert answer.status_code == 200
    assert answer.json()["status"] == "error"
    assert answer.json()["batch"] == []


def test_too_little_data_is_a_null_batch(http: httpx.Client) -> None:
    start(http)
    submit(http, 1)
    assert http.get("/batch").json() == {"batch": None}
    assert status(http) == (0, 1)


def test_batches_are_exact_oldest_first_and_count_as_steps_once_delivered(
    http: httpx.Client,
) -> None:
    start(http)
    submit(http, *range(7))
    assert status(http) == (0, 7)
    assert next_batch(http) == [0, 1]
    assert status(http) == (1, 5)
    assert next_batch(http) == [2, 3]
    assert next_batch(http) == [4, 5]
    assert next_batch(http) is None
    assert status(http) == (3, 1)


@pytest.mark.parametrize(
    ("sizes", "batches"),
    [
        pytest.param([4, 4, 4], [[0, 1], None], id="equal sizes"),
        pytest.param([8, 8], [[0], [1], None], id="groups that fill a batch"),
        pytest.param([1, 1, 4, 1, 1], [[0, 1, 2, 3, 4], None], id="packs of the largest size"),
        pytest.param([2, 4, 2, 8], [[0, 1, 2], [3], None], id="two packs of the same size"),
        pytest.param([4, 8, 4], [[0, 2], [1], None], id="a pack may close behind a larger group"),
        pytest.param([4, 2, 1], [None], id="too little of anything"),
    ],
)
def test_groups_of_different_sizes_in_a_batch_of_8(
    http: httpx.Client, sizes: list[int], batches: list[list[int] | None]
) -> None:
    start(http, batch_size=8)
    for marker, size in enumerate(sizes):
        submit(http, marker, size=size)
    assert [next_batch(http) for _ in batches] == batches


def test_a_group_that_fits_no_batch_yet_does_not_hold_up_the_others(http: httpx.Client) -> None:
    start(http)
    submit(http, 1, size=2)
    submit(http, 2, size=4)
    assert next_batch(http) == [2]
    submit(http, 3, 4, size=1)
    assert next_batch(http) == [1, 3, 4]


@pytest.mark.parametrize("size", [3, 5])
def test_a_group_that_no_number_of_fills_a_batch_is_refused(http: httpx.Client, size: int) -> None:
    start(http)
    answer = send_raw(http, group(1, size=size))
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", "tokens"]
    reason = answer.json()["detail"][0]["msg"]
    assert f"a group of {size} sequences" in reason
    assert "exactly 4" in reason
    assert status(http) == (0, 0)


def test_sizes_that_fill_a_batch_only_together_are_served_together(http: httpx.Client) -> None:
    start(http, batch_size=40)
    register_environment(http, group_size=12)
    alone = send_raw(http, group(1, size=12, env_id=0))
    assert alone.status_code == 422
    assert "connect an environment" in alone.json()["detail"][0]["msg"]
    register_environment(http, group_size=8)
    submit(http, 2, 3, 4, size=12, env_id=0)
    assert next_batch(http) is None
    submit(http, 5, 6, size=8, env_id=1)
    assert next_batch(http) == [2, 3, 5, 6]
    disconnect(http, 1)
    assert send_raw(http, group(7, size=12, env_id=0)).status_code == 422


def test_those_who_wait_for_each_other_do_not_pause_for_each_other(http: httpx.Client) -> None:
    start(http, batch_size=40)
    register_environment(http, group_size=12)
    register_environment(http, group_size=8)
    submit(http, *range(9), size=12, env_id=0)
    assert told(http, 0)["queue_size"] == 9
    assert told(http, 1)["queue_size"] == 0  # and not ceil(108 / 12) * 12 // 8 = 13


def test_a_batch_is_handed_out_by_registering_again_not_by_waiting(http: httpx.Client) -> None:
    start(http)
    submit(http, 1, 2, 3, 4)
    first = http.get("/batch").content
    register(http)
    assert http.get("/batch").content == first
    assert next_batch(http) == [3, 4]
    assert next_batch(http) is None
