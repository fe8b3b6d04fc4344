"""The loop against scripted servers on real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from grpo_core.errors import ServiceUnavailable
from grpo_env.patience import EveryGroupRefused
from grpo_env.registration import NoTrainer
from grpo_env.settings import EnvServerSettings, load_env_settings
from grpo_env.tasks import Message
from grpo_env.tasks.arithmetic import Sum
from grpo_env.worker import GroupLargerThanBatch, serve
from tests.unit.env.canned import PROMPT, generate_answer
from tests.unit.env.http_stub import Answer, Route, StubServer, stub_server
from tests.unit.env.scripted_run_api import RunApi


class Prompts:
    def encode(self, _messages: Sequence[Message]) -> list[int]:
        return PROMPT


class Sevens:
    """Always 3+4, so that canned answers have known scores."""

    name = "sevens"
    max_completion_tokens = 4

    def next_item(self) -> Sum:
        return Sum(3, 4)


def settings(run_api: StubServer, inference: StubServer, *more: str) -> EnvServerSettings:
    options = {
        "--openai.model-name": "m",
        "--openai.base-url": inference.url + "/v1",
        "--openai.request-deadline-s": "5",
        "--env.rollout-server-url": run_api.url,
        "--env.run-api-deadline-s": "5",
        "--env.group-size": "2",
    }
    options |= dict(option.split("=") for option in more)
    return load_env_settings(
        ["arithmetic", "serve", *(f"{name}={value}" for name, value in options.items())]
    )


async def run(api: RunApi, generate: Route, *more: str) -> None:
    with (
        stub_server(api.routes()) as run_api,
        stub_server({"POST /generate": generate}) as inference,
    ):
        async with asyncio.timeout(30):
            await serve(settings(run_api, inference, *more), Sevens(), Prompts())


def right_and_wrong(_body: dict[str, Any]) -> Answer:
    return 200, generate_answer(["7", "8"])


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


async def test_the_reward_sample_counts_the_groups_that_were_dropped() -> None:
    api = RunApi(num_steps=1)
    texts = iter([["7", "7"], ["7", "7"], ["8", "7"], ["7", "7"]])

    def generate(_body: dict[str, Any]) -> Answer:
        return 200, generate_answer(next(texts, ["7", "8"]))

    await run(api, generate, "--env.max-concurrent-groups=1")

    samples = [group["group_overrides"]["reward_sample"] for group in api.groups]
    assert samples[:2] == [{"sum": 5.0, "count": 6}, {"sum": 3.0, "count": 4}]


async def test_a_forgotten_environment_registers_again_and_goes_on() -> None:
    api = RunApi(num_steps=5)
    api.forget_at_group = 3

    await run(api, right_and_wrong)

    assert api.groups[-1]["env_id"] == 1
    assert api.disconnected == [1]


async def test_an_outage_of_the_inference_server_is_survived() -> None:
    api = RunApi(num_steps=2)
    answers = iter([(500, {"detail": "engine died"}), (503, {"detail": "restarting"})])

    def generate(body: dict[str, Any]) -> Answer:
        return next(answers, None) or right_and_wrong(body)

    await run(api, generate)

    assert len(api.groups) >= 4


async def test_an_inference_server_that_stays_broken_ends_the_work() -> None:
    api = RunApi()

    with pytest.raises(ServiceUnavailable, match="vllm-server failed for 1 s"):
        await run(api, lambda _body: (500, {"detail": "broken"}), "--openai.request-deadline-s=0.6")
    assert api.disconnected == [0]


async def test_a_run_api_that_went_away_ends_the_work() -> None:
    api = RunApi(num_steps=1000)
    routes = api.routes() | {"GET /status-env": lambda _body: (503, {"detail": "no Redis"})}

    with stub_server(routes) as run_api, stub_server({"POST /generate": right_and_wrong}) as engine:
        chosen = settings(run_api, engine, "--env.run-api-deadline-s=0.5")
        with pytest.raises(ServiceUnavailable, match="no Redis"):
            await serve(chosen, Sevens(), Prompts())


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
        release.wait(10)
        return 200, generate_answer(["7", "8"])

    work = asyncio.create_task(run(api, generate, "--env.max-concurrent-groups=3"))
    for _ in range(3):
        assert await asyncio.to_thread(started.acquire, timeout=10)
    assert not await asyncio.to_thread(started.acquire, timeout=0.5)
    work.cancel()
    # Lets the scripted server end: the environment has dropped its connections by then or waits.
    asyncio.get_running_loop().call_later(0.3, release.set)
    with pytest.raises(asyncio.CancelledError):
        await work
    assert api.disconnected == [0]
    assert api.groups == []
