"""`/status-env`: how environments pace themselves, number by number."""

from __future__ import annotations

import httpx
import pytest

from tests.integration.run_api_calls import (
    disconnect,
    next_batch,
    register_environment,
    send,
    start,
    status_env,
    submit,
    told,
)

KEYS = {
    *("current_step", "queue_size", "unallocated_fraction"),
    *("self_queue_size", "max_group_size", "env_weight"),
    *("pressure", "num_steps"),
}
"""Those of Atropos, and two more that its environments do not look at."""


@pytest.fixture
def two(http: httpx.Client) -> httpx.Client:
    """Two environments, each entitled to 4 of 16 sequences; the second has thrice the weight."""
    start(http, batch_size=16)
    register_environment(http, min_batch_allocation=0.25)
    register_environment(http, weight=3.0, group_size=4, min_batch_allocation=0.25)
    return http


def test_it_is_a_get_with_a_json_body(http: httpx.Client) -> None:
    start(http)
    register_environment(http)
    assert set(told(http, 0)) == KEYS
    assert told(http, "0") == told(http, 0)  # type: ignore[arg-type]
    assert http.post("/status-env", json={"env_id": 0}).status_code == 405
    assert http.get("/status-env").status_code == 422
    assert http.get("/status-env", params={"env_id": 0}).status_code == 422
    assert http.request("GET", "/status-env", json={"env_id": None}).status_code == 422


def test_nobody_else_may_ask(http: httpx.Client) -> None:
    start(http)
    register_environment(http)
    unknown = status_env(http, 1)
    assert unknown.status_code == 404
    assert "env_id 1" in unknown.json()["detail"]
    assert status_env(http, -1).status_code == 422


def test_an_empty_queue(two: httpx.Client) -> None:
    assert told(two, 0) == {
        "current_step": 0,
        "queue_size": 0,
        "unallocated_fraction": 0.5,
        "self_queue_size": 0,
        "max_group_size": 1,
        "env_weight": 0.25,
        "pressure": 0.0,
        "num_steps": None,
    }


def test_own_and_shared_sequences(two: httpx.Client) -> None:
    submit(two, 1, 2, env_id=0)
    submit(two, 3, 4, 5, size=4, env_id=1)
    assert told(two, 0) == {
        "current_step": 0,
        "queue_size": (4 + (12 - 4)) // 2,  # its own, and what the other holds beyond its minimum
        "unallocated_fraction": 0.5,
        "self_queue_size": 4 // 2,
        "max_group_size": 4,
        "env_weight": 0.25,
        "pressure": 0.0,
        "num_steps": None,
    }
    assert told(two, 1)["queue_size"] == (12 + max(0, 4 - 4)) // 4
    assert told(two, 1)["self_queue_size"] == 3
    assert told(two, 1)["env_weight"] == 0.75


def test_what_others_hold_is_rounded_up_to_the_largest_group(two: httpx.Client) -> None:
    submit(two, 1, size=8)
    submit(two, 2, env_id=0)
    assert told(two, 1)["max_group_size"] == 8
    # nobody's 8, and 2 of the first environment: a whole pack of 8, less its minimum of 4
    assert told(two, 1)["queue_size"] == (8 + (8 - 4)) // 4


def test_others_do_not_count_in_groups_of_one(http: httpx.Client) -> None:
    start(http, batch_size=16)
    register_environment(http, group_size=1)
    submit(http, *range(5), size=1)
    submit(http, 9, size=1, env_id=0)
    assert told(http, 0)["queue_size"] == 1
    assert told(http, 0)["max_group_size"] == 1


def test_parts_count_once_they_are_queued(two: httpx.Client) -> None:
    send(two, 1, size=3, env_id=1)
    assert told(two, 1)["self_queue_size"] == 0
    assert told(two, 1)["max_group_size"] == 1
    send(two, 2, size=1, env_id=1)
    assert told(two, 1)["self_queue_size"] == 1
    assert told(two, 1)["max_group_size"] == 3


def test_batches_handed_out_do_not_count(http: httpx.Client) -> None:
    start(http, starting_step=5)
    register_environment(http)
    submit(http, 1, 2, 3, env_id=0)
    assert (told(http, 0)["current_step"], told(http, 0)["queue_size"]) == (5, 3)
    assert next_batch(http) == [1, 2]
    assert (told(http, 0)["current_step"], told(http, 0)["queue_size"]) == (6, 1)


def test_weight_is_a_share_of_tokens(http: httpx.Client) -> None:
    start(http)
    register_environment(http, weight=1.0, max_token_length=100)
    register_environment(http, weight=2.0, max_token_length=150)
    assert told(http, 0)["env_weight"] == pytest.approx(100 / 400)
    assert told(http, 1)["env_weight"] == pytest.approx(300 / 400)


def test_weight_is_never_below_one_percent(http: httpx.Client) -> None:
    start(http)
    register_environment(http, weight=0.0)
    assert told(http, 0)["env_weight"] == 0.01
    register_environment(http, weight=1e6)
    assert told(http, 0)["env_weight"] == 0.01
    assert told(http, 1)["env_weight"] == 1.0


def test_who_has_disconnected_has_neither_weight_nor_minimum(two: httpx.Client) -> None:
    submit(two, 1, 2, size=4, env_id=1)
    disconnect(two, 1)
    status = told(two, 0)
    assert status["env_weight"] == 1.0
    assert status["unallocated_fraction"] == 0.75
    assert status["queue_size"] == 8 // 2
    disconnect(two, 0)
    assert told(two, 0)["env_weight"] == 0.01


def test_minimums_above_one_leave_nothing_unallocated(http: httpx.Client) -> None:
    start(http)
    for _ in range(2):
        register_environment(http, min_batch_allocation=0.7)
    assert told(http, 0)["unallocated_fraction"] == 0.0


def test_a_queue_of_which_no_batch_can_be_formed_stops_nobody(http: httpx.Client) -> None:
    start(http, batch_size=12)
    register_environment(http, group_size=4)
    register_environment(http, group_size=6)
    submit(http, 1, 2, size=4, env_id=0)
    submit(http, 3, size=6, env_id=1)
    assert next_batch(http) is None
    assert [told(http, env_id)["queue_size"] for env_id in (0, 1)] == [2, 1]
    submit(http, 4, size=6, env_id=1)
    assert [told(http, env_id)["queue_size"] for env_id in (0, 1)] == [
        (8 + 12) // 4,
        (12 + 12) // 6,
    ]
    assert next_batch(http) == [3, 4]
