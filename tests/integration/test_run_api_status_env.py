"""`/status-env`: how environments pace themselves. Its formulas: `unit/api/test_allocation`."""

from __future__ import annotations

from typing import Any

import httpx

from tests.integration.run_api_calls import (
    next_batch,
    register_environment,
    send,
    start,
    status,
    status_env,
    submit,
    told,
)


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


def test_own_and_shared_sequences(http: httpx.Client) -> None:
    """Two environments, each entitled to 4 of 16 sequences; the second has thrice the weight."""
    start(http, batch_size=16, starting_step=5)
    register_environment(http, min_batch_allocation=0.25)
    register_environment(http, weight=3.0, group_size=4, min_batch_allocation=0.25)
    empty = {
        "current_step": 5,
        "queue_size": 0,
        "unallocated_fraction": 0.5,
        "self_queue_size": 0,
        "max_group_size": 1,
        "env_weight": 0.25,
        "pressure": 0.0,
        "num_steps": None,
    }
    assert told(http, 0) == empty
    submit(http, 1, 2, env_id=0)
    send(http, 3, size=3, env_id=1)
    assert told(http, 1)["self_queue_size"] == 0  # parts count once they are a group
    send(http, 3, size=1, env_id=1)
    submit(http, 4, 5, size=4, env_id=1)
    assert told(http, 0) == empty | {
        "queue_size": (4 + (12 - 4)) // 2,  # its own, and what the other holds beyond its minimum
        "self_queue_size": 4 // 2,
        "max_group_size": 4,
    }
    assert told(http, 1) == empty | {
        "queue_size": (12 + max(0, 4 - 4)) // 4,
        "self_queue_size": 3,
        "max_group_size": 4,
        "env_weight": 0.75,
    }
    assert next_batch(http) == [1, 2, 3, 3, 4, 5]
    assert told(http, 0) == empty | {"current_step": 6}


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
