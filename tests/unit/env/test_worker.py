"""The loop against scripted servers on real sockets."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from grpo_env.patience import EveryGroupRefused
from grpo_env.registration import NoTrainer
from grpo_env.worker import GroupLargerThanBatch
from tests.unit.env.canned import generate_answer, inference_routes
from tests.unit.env.feeding import feed, right_and_wrong, run
from tests.unit.env.http_stub import Answer
from tests.unit.env.scripted_run_api import RunApi


async def test_a_run_is_fed_to_its_last_step_and_left_politely() -> None:
    api = RunApi(num_steps=3, polls_before_trainer=1)

    await run(api, right_and_wrong)

    assert len(api.groups) >= 6
    assert {group["env_id"] for group in api.groups} == {0}
    assert api.groups[0]["scores"] == [1.0, 0.0]
    assert api.disconnected == [0]


async def test_total_steps_ends_the_run_earlier_than_the_trainer() -> None:
    api = RunApi(num_steps=1000)

    await run(api, right_and_wrong, "--env.total-steps=1")

    assert 2 <= len(api.groups) < 20


async def test_a_trainer_that_comes_back_for_more_steps_is_fed_to_the_new_end() -> None:
    api = RunApi(num_steps=2)
    api.prolonged_to = 5

    await run(api, right_and_wrong)

    assert len(api.groups) >= 10


async def test_a_run_that_was_complete_before_is_left_unless_told_to_wait() -> None:
    api = RunApi(num_steps=3)
    api.steps_before = 3

    await run(api, right_and_wrong)

    assert api.groups == []
    assert api.disconnected == [0]


async def test_a_complete_run_that_is_prolonged_later_is_fed() -> None:
    api = RunApi(num_steps=3)
    api.steps_before = 3
    work = asyncio.create_task(run(api, right_and_wrong, "--env.next-run-deadline-s=60"))
    async with asyncio.timeout(90):
        while api.status_polls < 4:
            await asyncio.sleep(0.01)
    assert api.groups == []
    api.prolonged_to = 5

    await work

    assert len(api.groups) >= 4
    assert api.disconnected == [0]


async def test_the_reward_sample_counts_the_groups_that_were_dropped() -> None:
    api = RunApi(num_steps=1)
    texts = iter([["7", "7"], ["7", "7"], ["8", "7"], ["7", "7"]])

    def generate(_body: dict[str, Any]) -> Answer:
        return 200, generate_answer(next(texts, ["7", "8"]))

    await run(api, generate, "--env.max-concurrent-groups=1")

    samples = [group["group_overrides"]["reward_sample"] for group in api.groups]
    assert samples[:2] == [{"sum": 5.0, "count": 6}, {"sum": 3.0, "count": 4}]


async def test_a_registration_says_what_the_settings_say() -> None:
    seen = await feed(
        RunApi(num_steps=1).routes(),
        inference_routes(right_and_wrong),
        *("--env.min-batch-allocation=0.25", "--env.weight=2", "--env.wandb-name=x"),
    )

    assert seen.run_api.bodies("POST /register-env") == [
        {
            "max_token_length": 2048,
            "desired_name": "x",
            "weight": 2.0,
            "group_size": 2,
            "min_batch_allocation": 0.25,
        }
    ]


async def test_refusing_every_group_ends_the_work_and_says_why() -> None:
    with pytest.raises(EveryGroupRefused, match="unknown parameter"):
        await run(RunApi(), lambda _body: (422, {"detail": "unknown parameter"}))

    api = RunApi()
    api.submit_status = 422
    with pytest.raises(EveryGroupRefused, match="submission"):
        await run(api, right_and_wrong)


async def test_a_group_that_no_batch_can_hold_is_refused_at_the_start() -> None:
    with pytest.raises(GroupLargerThanBatch, match="batch of 4 sequences"):
        await run(RunApi(), right_and_wrong, "--env.group-size=8")


async def test_waiting_for_a_trainer_has_an_end() -> None:
    with pytest.raises(NoTrainer, match=r"within 0.3 s"):
        await run(RunApi(polls_before_trainer=100), right_and_wrong, "--env.trainer-deadline-s=0.3")


async def test_concurrency_is_bounded_and_cancelling_says_goodbye() -> None:
    api = RunApi(num_steps=1000)
    release = threading.Event()
    started = threading.Semaphore(0)

    def generate(_body: dict[str, Any]) -> Answer:
        started.release()
        release.wait(100)
        return 200, generate_answer(["7", "8"])

    work = asyncio.create_task(run(api, generate, "--env.max-concurrent-groups=3"))
    for _ in range(3):
        assert await asyncio.to_thread(started.acquire, timeout=60)
    assert not await asyncio.to_thread(started.acquire, timeout=0.5)
    work.cancel()
    # Lets the scripted server end: the environment has dropped its connections by then or waits.
    asyncio.get_running_loop().call_later(0.3, release.set)
    with pytest.raises(asyncio.CancelledError):
        await work
    assert api.disconnected == [0]
    assert api.groups == []
