"""Environments register, read `/status-env`, stop polling, and disconnect.

`tests/unit/api/test_env_status.py` tests the formulas of `/status-env`.
"""

from __future__ import annotations

import json
from typing import Any

import redis

from grpo_api.store.redis import layout_prefix
from grpo_api.store.run import GONE_TIMEOUTS
from grpo_core.weights.servers import ServerState, ServerStatus
from grpo_core.weights.version_log import ServerVersionLog
from tests.fixtures.run_api import ENVIRONMENT_TIMEOUT_S, RUN_ID
from tests.integration.run_api_calls import WAITING, ApiClient, group
from tests.support.wait import wait_for


def test_environments_wait_until_a_trainer_has_registered_and_polled(http: ApiClient) -> None:
    assert http.register_environment() == WAITING
    http.register(starting_step=3)
    assert http.register_environment() == WAITING
    assert http.get("/environments").json() == []
    http.get("/batch")
    assert http.register_environment() == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "math_0",
        "checkpoint_dir": "checkpoints",
        "starting_step": 3,
        "checkpoint_interval": 5,
        "num_steps": 100,
        "run_uuid": http.get("/status").json()["run_uuid"],
        "item_positions": {},
    }
    http.submit(1, 2)
    assert http.next_batch() == [1, 2]
    assert http.register_environment()["starting_step"] == 4


def test_used_items_add_up_with_the_groups_that_run_api_accepts(http: ApiClient) -> None:
    """Submissions side by side arrive in any order. A part has its item too; a repetition and a
    refused group change nothing, and a new run knows no items."""

    def send(marker: int, positions: object, **changes: Any) -> int:
        headers = {"item-positions": json.dumps(positions), "idempotency-key": str(marker)}
        return http.post("/scored_data", json=group(marker, **changes), headers=headers).status_code

    http.start()
    assert send(1, {"gsm8k 0 \u00e9": "0-0,4-5"}) == 200
    assert send(2, {"gsm8k 0 \u00e9": "0-2", "math 0 f": "0-6"}) == 200
    assert send(2, {"gsm8k 0 \u00e9": "0-99"}) == 200
    env_id = http.register_environment()["env_id"]
    assert send(3, {"gsm8k 0 \u00e9": "3-3,7-7,10-20"}, size=1, env_id=env_id) == 200
    assert send(4, {"gsm8k 0 \u00e9": "0-99"}, scores=[1.0]) == 422
    assert send(5, {"gsm8k 0 \u00e9": "five"}) == send(6, ["0-1"]) == 422
    known = http.register_environment()["item_positions"]
    assert known == {"gsm8k 0 \u00e9": "0-5,7-7,10-20", "math 0 f": "0-6"}
    http.get("/reset_data")
    http.start()
    assert http.register_environment()["item_positions"] == {}


def test_disconnecting_twice_is_fine_and_nobody_is_named(http: ApiClient) -> None:
    http.start()
    http.register_environment()
    for _ in range(2):
        assert http.disconnect(0) == {"status": "success"}
    answer = http.post("/disconnect-env", json={"env_id": 9})
    assert (answer.status_code, answer.json()["status"]) == (200, "failure")
    assert "env_id 9" in answer.json()["error"]
    unknown = http.status_env(9)
    assert unknown.status_code == 404
    assert "env_id 9" in unknown.json()["detail"]


def test_a_silent_environment_is_not_waited_for_until_it_polls(
    http: ApiClient, redis_url: str
) -> None:
    def stay_silent(seconds: float) -> None:
        """Move the last poll of environment 1 this far into the past."""
        with redis.Redis.from_url(redis_url) as connection:
            connection.hincrby(f"{layout_prefix(RUN_ID)}seen", "1", -int(seconds * 1000))

    http.start()
    http.register_environment()
    http.register_environment(min_batch_allocation=0.5)
    http.submit(1, 2, 3, 4, env_id=0)
    http.told(1)
    stay_silent(ENVIRONMENT_TIMEOUT_S - 60)
    assert (http.told(0)["env_weight"], http.next_batch()) == (0.5, None)
    stay_silent(60)
    assert (http.told(0)["env_weight"], http.next_batch()) == (1.0, [1, 2])
    assert (http.told(1)["env_weight"], http.next_batch()) == (0.5, None)
    http.submit(5, env_id=1)
    assert http.next_batch() == [3, 5]


def test_environments_that_left_are_not_read_again(http: ApiClient, redis_url: str) -> None:
    """The first one says that it leaves; the second one ends without a word, with a part sent."""
    http.start()
    trainer = http.register().json()["uuid"]
    for _ in range(3):
        http.register_environment()
    http.disconnect(0)
    told_trainer = http.lease(trainer).json()["environments"]
    assert told_trainer.items() >= {"registered": 3, "connected": 2}.items()
    assert http.send_group(1, size=1, env_id=1)["status"] == "buffered"
    with redis.Redis.from_url(redis_url) as connection:
        gone_ms = int(GONE_TIMEOUTS * ENVIRONMENT_TIMEOUT_S * 1000)
        connection.hincrby(f"{layout_prefix(RUN_ID)}seen", "1", -gone_ms - 1000)
        assert known(http) == [1, 2]
        assert http.register_environment()["env_id"] == 3
        assert known(http) == [2, 3]
        for name in ("seen", "connected", "group_sizes", "environment_names"):
            key = f"{layout_prefix(RUN_ID)}{name}"
            kind = connection.type(key)
            assert (connection.scard if kind == b"set" else connection.hlen)(key) == 2, name
    facts = http.run_facts()
    assert (facts["buffered_parts"], facts["environments_registered"]) == (0, 4)
    assert http.status_env(1).status_code == 404


def known(http: ApiClient) -> list[int]:
    return [environment["env_id"] for environment in http.get("/environments").json()]


async def test_status_env_counts_sequences_and_lists_the_inference_servers(
    http: ApiClient, redis_url: str
) -> None:
    """Two environments with minimums of 4 of 16 sequences; the second has weight 3."""
    http.start(batch_size=16, starting_step=5)
    http.register_environment(min_batch_allocation=0.25)
    http.register_environment(weight=3.0, group_size=4, min_batch_allocation=0.25)
    http.submit(1, 2, env_id=0)
    http.submit(4, 5, size=4, env_id=1)
    http.send_group(3, size=3, env_id=1)  # parts count when they add up to a group
    server = {"name": "gpu3", "url": "http://gpu3:9001", "state": ServerState.SERVING}
    async with ServerVersionLog(redis_url, RUN_ID, "gpu3") as log:
        await log.report(ServerStatus(**server, epoch=1, step=4))
        wait_for(lambda: http.told(0)["servers"])
        told = http.told(0)
        await log.leave()
    wait_for(lambda: http.told(0)["servers"] == [])
    assert told == {
        "current_step": 5,
        "queue_size": (4 + (8 - 4)) // 2,  # own, and the other's beyond its minimum
        "unallocated_fraction": 0.5,
        "self_queue_size": 4 // 2,
        "max_group_size": 4,
        "env_weight": 0.25,
        "pressure": 0.0,
        "num_steps": None,
        "servers": [server | {"version": [1, 4]}],
    }
