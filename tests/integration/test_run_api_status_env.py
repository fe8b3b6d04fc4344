"""`/status-env`: how environments pace themselves. Its formulas: `unit/api/test_allocation`."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.integration.run_api_calls import (
    disconnect,
    next_batch,
    register_environment,
    send,
    start,
    status,
    status_env,
    submit,
    told,
)


@pytest.fixture
def two(http: httpx.Client) -> httpx.Client:
    """Two environments, each entitled to 4 of 16 sequences; the second has thrice the weight."""
    start(http, batch_size=16)
    register_environment(http, min_batch_allocation=0.25)
    register_environment(http, weight=3.0, group_size=4, min_batch_allocation=0.25)
    return http


def test_it_is_a_get_whose_json_body_names_a_known_environment(http: httpx.Client) -> None:
    start(http)
    register_environment(http)
    assert told(http, "0") == told(http, 0)  # type: ignore[arg-type]
    assert http.post("/status-env", json={"env_id": 0}).status_code == 405
    assert http.get("/status-env", params={"env_id": 0}).status_code == 422
    for env_id in (None, -1):
        assert status_env(http, env_id).status_code == 422
    unknown = status_env(http, 1)
    assert unknown.status_code == 404
    assert "env_id 1" in unknown.json()["detail"]


def test_own_and_shared_sequences(two: httpx.Client) -> None:
    empty = {
        "current_step": 0,
        "queue_size": 0,
        "unallocated_fraction": 0.5,
        "self_queue_size": 0,
        "max_group_size": 1,
        "env_weight": 0.25,
        "pressure": 0.0,
        "num_steps": None,
    }
    assert told(two, 0) == empty
    submit(two, 1, 2, env_id=0)
    submit(two, 3, 4, 5, size=4, env_id=1)
    assert told(two, 0) == empty | {
        "queue_size": (4 + (12 - 4)) // 2,  # its own, and what the other holds beyond its minimum
        "self_queue_size": 4 // 2,
        "max_group_size": 4,
    }
    assert told(two, 1) == empty | {
        "queue_size": (12 + max(0, 4 - 4)) // 4,
        "self_queue_size": 3,
        "max_group_size": 4,
        "env_weight": 0.75,
    }


def test_what_others_hold_is_rounded_up_to_the_largest_group(two: httpx.Client) -> None:
    submit(two, 1, size=8)
    submit(two, 2, env_id=0)
    assert told(two, 1)["max_group_size"] == 8
    # nobody's 8, and 2 of the first environment: a whole pack of 8, less its minimum of 4
    assert told(two, 1)["queue_size"] == (8 + (8 - 4)) // 4


def test_parts_count_once_they_are_queued(two: httpx.Client) -> None:
    for size, expected in ((3, (0, 1)), (1, (1, 3))):
        send(two, 1, size=size, env_id=1)
        seen = told(two, 1)
        assert (seen["self_queue_size"], seen["max_group_size"]) == expected


def test_batches_handed_out_do_not_count(http: httpx.Client) -> None:
    start(http, starting_step=5)
    register_environment(http)
    submit(http, 1, 2, 3, env_id=0)
    assert (told(http, 0)["current_step"], told(http, 0)["queue_size"]) == (5, 3)
    assert next_batch(http) == [1, 2]
    assert (told(http, 0)["current_step"], told(http, 0)["queue_size"]) == (6, 1)


def test_a_disconnected_environment_has_neither_weight_nor_minimum(two: httpx.Client) -> None:
    submit(two, 1, 2, size=4, env_id=1)
    disconnect(two, 1)
    seen = told(two, 0)
    assert (seen["env_weight"], seen["unallocated_fraction"]) == (1.0, 0.75)
    assert seen["queue_size"] == 8 // 2


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


def test_an_archived_environment_paces_itself_until_the_run_is_done(http: httpx.Client) -> None:
    """By the decisions of `atroposlib.envs.base`, with two batches off policy at most."""
    batch_size, group_size, most_batches, num_steps = 4, 2, 2, 5
    start(http, batch_size=batch_size, num_steps=num_steps)
    env_id = register_environment(http, group_size=group_size)["env_id"]

    def is_done(seen: dict[str, Any]) -> bool:
        queued = seen["queue_size"] * group_size // batch_size
        return bool(seen["current_step"] + queued > num_steps)

    sent = delivered = most_queued = 0
    while not is_done(seen := told(http, env_id)):
        if seen["queue_size"] * group_size >= most_batches * batch_size:
            assert next_batch(http) == [2 * delivered, 2 * delivered + 1]
            delivered += 1
        else:
            submit(http, sent, env_id=env_id)
            sent += 1
        most_queued = max(most_queued, status(http)[1])
        assert sent <= 2 * (num_steps + most_batches), "it does not end"
    assert most_queued == most_batches * batch_size // group_size
    assert delivered + most_batches > num_steps
