"""`/register-env`, `/disconnect-env`, `/environments`: they come, fall silent, and leave."""

from __future__ import annotations

import httpx
import redis

from grpo_api.redis_link import layout_prefix
from tests.fixtures.run_api import ENVIRONMENT_TIMEOUT_S, RUN_ID
from tests.integration.run_api_calls import (
    ENVIRONMENT,
    WAITING,
    disconnect,
    next_batch,
    refused_field,
    register,
    register_environment,
    send,
    start,
    submit,
    told,
)


def test_environments_wait_until_a_trainer_has_registered_and_polled(http: httpx.Client) -> None:
    assert register_environment(http) == WAITING
    register(http, starting_step=3)
    assert register_environment(http) == WAITING
    assert http.get("/environments").json() == []
    http.get("/batch")
    assert register_environment(http) == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "math_0",
        "checkpoint_dir": "checkpoints",
        "starting_step": 3,
        "checkpoint_interval": 5,
        "num_steps": 100,
    }
    submit(http, 1, 2)
    assert next_batch(http) == [1, 2]
    assert register_environment(http)["starting_step"] == 4


def test_only_the_minimum_may_be_left_out_and_a_batch_must_hold_a_group(
    http: httpx.Client,
) -> None:
    start(http)
    required = {name: ENVIRONMENT[name] for name in set(ENVIRONMENT) - {"min_batch_allocation"}}
    for field in required:
        partial = {name: value for name, value in required.items() if name != field}
        assert refused_field(http.post("/register-env", json=partial)) == field
    for field, value in (("group_size", 8), ("weight", -1.0), ("min_batch_allocation", 1.5)):
        answer = http.post("/register-env", json=required | {field: value})
        assert refused_field(answer) == field
    assert http.get("/environments").json() == []
    assert http.post("/register-env", json=required).json()["status"] == "success"


def test_environments_lists_everyone_with_what_a_batch_holds_of_them(http: httpx.Client) -> None:
    start(http, batch_size=8)
    register_environment(http, min_batch_allocation=0.75)
    register_environment(http, min_batch_allocation=0.75, group_size=4, desired_name="code")
    again = register_environment(http)
    assert (again["env_id"], again["wandb_name"]) == (2, "math_1")
    disconnect(http, 2)
    assert http.get("/environments").json() == [
        {"env_id": 0, "name": "math_0", "connected": True, "group_size": 2, "min_sequences": 4},
        {"env_id": 1, "name": "code_0", "connected": True, "group_size": 4, "min_sequences": 4},
        {"env_id": 2, "name": "math_1", "connected": False, "group_size": 2, "min_sequences": 0},
    ]


def test_disconnecting_twice_is_fine_and_nobody_is_named(http: httpx.Client) -> None:
    start(http)
    register_environment(http)
    # an id that is counted from the end reaches nobody
    assert refused_field(http.post("/disconnect-env", json={"env_id": -1})) == "env_id"
    assert http.get("/environments").json()[0]["connected"] is True
    for _ in range(2):
        assert disconnect(http, 0) == {"status": "success"}
    answer = http.post("/disconnect-env", json={"env_id": 9})
    assert (answer.status_code, answer.json()["status"]) == (200, "failure")
    assert "env_id 9" in answer.json()["error"]


def test_what_a_disconnected_environment_sends_is_still_served(http: httpx.Client) -> None:
    start(http)
    register_environment(http)
    submit(http, 1, env_id=0)
    disconnect(http, 0)
    submit(http, 2, env_id=0)
    assert next_batch(http) == [1, 2]


def test_parts_of_one_environment_are_apart_from_those_of_the_next(http: httpx.Client) -> None:
    """One that starts again is another: what it sent halfway is not completed by what it sends."""
    start(http)
    for env_id, name in enumerate(["math_0", "math_1"]):
        assert register_environment(http)["wandb_name"] == name
        part = send(http, 1, size=1, env_id=env_id)
        assert part == {"status": "buffered", "buffer_size": 1}


def test_a_silent_environment_loses_weight_and_minimum_until_it_polls(
    http: httpx.Client, redis_url: str
) -> None:
    def stay_silent(seconds: float) -> None:
        """Let the last poll of environment 1 be so much longer ago."""
        with redis.Redis.from_url(redis_url) as connection:
            connection.hincrby(f"{layout_prefix(RUN_ID)}seen", "1", -int(seconds * 1000))

    start(http)
    register_environment(http)
    register_environment(http, min_batch_allocation=0.5)
    submit(http, 1, 2, 3, 4, env_id=0)
    told(http, 1)
    stay_silent(ENVIRONMENT_TIMEOUT_S - 60)
    assert told(http, 0)["env_weight"] == 0.5
    assert next_batch(http) is None

    stay_silent(60)
    assert next_batch(http) == [1, 2]
    alone = told(http, 0)
    assert (alone["env_weight"], alone["unallocated_fraction"]) == (1.0, 1.0)

    back = told(http, 1)
    assert (back["env_weight"], back["unallocated_fraction"]) == (0.5, 0.5)
    assert told(http, 0)["env_weight"] == 0.5
    assert next_batch(http) is None
    submit(http, 5, env_id=1)
    assert next_batch(http) == [3, 5]
