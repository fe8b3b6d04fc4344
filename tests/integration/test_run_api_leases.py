"""Leases and acknowledgements over HTTP. `test_run_store_leases` tests them on the store.

`test_run_api_bad_http` tests invalid requests.
"""

from __future__ import annotations

import json
from http.client import HTTPConnection

import httpx
import pytest
import redis

from grpo_core.redis.keys import served_weights_key
from tests.fixtures.run_api import RUN_ID
from tests.integration.run_api_calls import (
    WAITING,
    acknowledge,
    lease,
    leased,
    register,
    register_environment,
    send,
    status,
    submit,
    told,
)
from tests.support.wait import DEADLINE_S, wait_for


@pytest.fixture
def trainer(http: httpx.Client) -> int:
    """The id of a registered trainer with batches of two groups."""
    uuid: int = register(http).json()["uuid"]
    return uuid


def test_registering_again_redelivers_byte_for_byte_what_is_not_acknowledged(
    http: httpx.Client, trainer: int
) -> None:
    submit(http, *range(6))
    assert leased(lease(http, trainer)) == (1, [0, 1])
    answers = [lease(http, trainer, after).content for after in range(3)]
    done = acknowledge(http, trainer, 1).json()
    assert done == {"status": "success", "acknowledged": 1, "released": 1}
    again = register(http).json()["uuid"]
    assert [lease(http, again, after).content for after in (0, 2)] == answers[1:]
    assert lease(http, trainer, after=2).status_code == 409
    assert acknowledge(http, trainer, 3).status_code == 409
    assert acknowledge(http, again, 3).json()["released"] == 2
    assert lease(http, again).json()["batch"] is None


def test_environments_are_told_where_the_run_ends_for_this_trainer(
    http: httpx.Client, trainer: int
) -> None:
    """Batches count like steps, even if some are skipped or handed out again."""
    submit(http, *range(4))
    lease(http, trainer, batches_left=3)
    register_environment(http)

    def step_and_end() -> tuple[int, int | None]:
        return status(http)[0], told(http, 0)["num_steps"]

    assert step_and_end() == (1, 3)
    lease(http, trainer, after=1, batches_left=3)  # the trainer took no step on the first batch
    assert step_and_end() == (2, 4)
    assert acknowledge(http, trainer, 1).is_success

    again = register(http, num_steps=1).json()["uuid"]
    lease(http, again, batches_left=3)  # the second batch, again
    assert step_and_end() == (2, 4)
    lease(http, again, after=2, batches_left=0)
    assert step_and_end() == (2, 2)


def test_a_lease_says_under_which_version_each_group_was_received(
    http: httpx.Client, trainer: int, redis_url: str
) -> None:
    submit(http, 1)
    with redis.Redis.from_url(redis_url) as connection:
        connection.hset(served_weights_key(RUN_ID), mapping={"epoch": 3, "step": 17})
        submit(http, 2)
        connection.delete(served_weights_key(RUN_ID))
    answer = lease(http, trainer).json()
    assert answer["received_under"] == [None, [3, 17]]


def test_a_long_poll_starts_the_run_and_ends_with_the_groups_that_complete_the_batch(
    http: httpx.Client, trainer: int
) -> None:
    send(http, 1)
    assert register_environment(http) == WAITING
    held = HTTPConnection(http.base_url.host, http.base_url.port, timeout=DEADLINE_S)
    held.request("GET", f"/batch?trainer={trainer}&wait_s=60")
    # environments can register after the trainer's first poll
    wait_for(lambda: register_environment(http)["status"], lambda answer: answer == "success")
    send(http, 2)
    answer = json.load(held.getresponse())
    assert [item["tokens"][0][0] for item in answer["batch"]] == [1, 2]
    held.close()
