"""`/register-env`, `/disconnect-env`, `/environments`: they come, fall silent, and leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import redis

from grpo_api.redis_link import layout_prefix
from tests.fixtures.run_api import ENVIRONMENT_TIMEOUT_S, RUN_ID
from tests.integration.run_api_calls import (
    ENVIRONMENT,
    WAITING,
    disconnect,
    next_batch,
    register,
    register_environment,
    send,
    start,
    status,
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


def test_ids_count_environments_and_names_count_their_like(http: httpx.Client) -> None:
    start(http)
    names = ["math", "math", "code", "math"]
    answers = [register_environment(http, desired_name=name) for name in names]
    assert [answer["env_id"] for answer in answers] == [0, 1, 2, 3]
    assert [a["wandb_name"] for a in answers] == ["math_0", "math_1", "code_0", "math_2"]


def test_starting_step_is_that_of_the_run_now(http: httpx.Client) -> None:
    start(http, starting_step=3)
    submit(http, 1, 2)
    assert next_batch(http) == [1, 2]
    assert register_environment(http)["starting_step"] == 4


@pytest.mark.parametrize("field", ["max_token_length", "desired_name", "weight", "group_size"])
@pytest.mark.parametrize("how", ["missing", "null"])
def test_every_field_but_the_minimum_is_required(http: httpx.Client, field: str, how: str) -> None:
    start(http)
    body = ENVIRONMENT | {field: None}
    if how == "missing":
        del body[field]
    answer = http.post("/register-env", json=body)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", field]


def test_the_minimum_may_be_left_out(http: httpx.Client) -> None:
    start(http)
    body = {name: value for name, value in ENVIRONMENT.items() if name != "min_batch_allocation"}
    assert http.post("/register-env", json=body).json()["status"] == "success"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"weight": -1.0}, "weight"),
        ({"min_batch_allocation": 1.5}, "min_batch_allocation"),
        ({"min_batch_allocation": -0.1}, "min_batch_allocation"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": 2.5}, "group_size"),
        ({"group_size": 8}, "group_size"),
    ],
)
def test_environment_that_can_never_be_served_is_refused(
    http: httpx.Client, changes: dict[str, Any], field: str
) -> None:
    start(http)
    answer = http.post("/register-env", json=ENVIRONMENT | changes)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", field]
    assert http.get("/environments").json() == []


def test_group_larger_than_the_batch_is_refused_with_the_reason(http: httpx.Client) -> None:
    start(http)
    answer = http.post("/register-env", json=ENVIRONMENT | {"group_size": 8})
    reason = answer.json()["detail"][0]["msg"]
    assert "8 sequences can never be served" in reason
    assert "exactly 4" in reason


def test_environments_lists_everyone_with_what_a_batch_holds_of_them(http: httpx.Client) -> None:
    start(http, batch_size=8)
    register_environment(http, min_batch_allocation=0.75)
    register_environment(http, min_batch_allocation=0.75, group_size=4)
    register_environment(http)
    disconnect(http, 2)
    assert http.get("/environments").json() == [
        {"env_id": 0, "name": "math_0", "connected": True, "group_size": 2, "min_sequences": 4},
        {"env_id": 1, "name": "math_1", "connected": True, "group_size": 4, "min_sequences": 4},
        {"env_id": 2, "name": "math_2", "connected": False, "group_size": 2, "min_sequences": 0},
    ]


def test_disconnecting(http: httpx.Client) -> None:
    start(http)
    register_environment(http)
    assert disconnect(http, 0) == {"status": "success"}
    assert disconnect(http, 0) == {"status": "success"}


def test_disconnecting_nobody_answers_200_with_the_reason(http: httpx.Client) -> None:
    for known in (False, True):
        if known:
            start(http)
            register_environment(http)
        answer = http.post("/disconnect-env", json={"env_id": 9})
        assert answer.status_code == 200
        assert answer.json().keys() == {"status", "error"}
        assert answer.json()["status"] == "failure"
        assert "env_id 9" in answer.json()["error"]


def test_an_id_counted_from_the_end_reaches_nobody(http: httpx.Client) -> None:
    start(http)
    register_environment(http)
    assert http.post("/disconnect-env", json={"env_id": -1}).status_code == 422
    assert http.get("/environments").json()[0]["connected"] is True


def test_what_a_disconnected_environment_sent_is_still_served(http: httpx.Client) -> None:
    start(http)
    register_environment(http)
    submit(http, 1, env_id=0)
    disconnect(http, 0)
    submit(http, 2, env_id=0)
    assert next_batch(http) == [1, 2]


def test_parts_of_a_disconnected_environment_are_dropped(http: httpx.Client) -> None:
    start(http)
    register_environment(http)
    send(http, 1, size=1, env_id=0)
    disconnect(http, 0)
    assert send(http, 2, size=1, env_id=0) == {"status": "buffered", "buffer_size": 1}
    assert status(http) == (0, 0)


def test_a_restarted_environment_is_another_one(http: httpx.Client) -> None:
    start(http)
    register_environment(http)
    send(http, 1, size=1, env_id=0)
    again = register_environment(http)
    assert (again["env_id"], again["wandb_name"]) == (1, "math_1")
    assert send(http, 2, size=1, env_id=1) == {"status": "buffered", "buffer_size": 1}


@pytest.fixture
def stay_silent(redis_url: str) -> Iterator[Callable[[int, float], None]]:
    """Lets an environment's last poll be so many seconds longer ago."""
    with redis.Redis.from_url(redis_url) as connection:

        def move_back(env_id: int, seconds: float) -> None:
            connection.hincrby(f"{layout_prefix(RUN_ID)}seen", str(env_id), -int(seconds * 1000))

        yield move_back


def test_a_silent_environment_loses_weight_and_minimum_until_it_polls(
    http: httpx.Client, stay_silent: Callable[[int, float], None]
) -> None:
    start(http)
    register_environment(http)
    register_environment(http, min_batch_allocation=0.5)
    submit(http, 1, 2, 3, 4, env_id=0)
    told(http, 1)

    stay_silent(1, ENVIRONMENT_TIMEOUT_S - 40)
    assert told(http, 0)["env_weight"] == 0.5
    assert next_batch(http) is None

    stay_silent(1, 40)
    assert next_batch(http) == [1, 2]
    assert told(http, 0)["env_weight"] == 1.0
    assert told(http, 0)["unallocated_fraction"] == 1.0

    back = told(http, 1)
    assert (back["env_weight"], back["unallocated_fraction"]) == (0.5, 0.5)
    assert told(http, 0)["env_weight"] == 0.5
    assert next_batch(http) is None
    submit(http, 5, env_id=1)
    assert next_batch(http) == [3, 5]
