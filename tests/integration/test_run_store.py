"""Lost answers and concurrent polls, on a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from grpo_api.dispatch import BatchDispatcher
from grpo_api.errors import StoreUnavailable
from grpo_api.payloads import pack, unpack
from grpo_api.records import LeasedBatch
from grpo_api.redis_link import RedisLink
from grpo_api.store import RunStore
from grpo_core.wire import EnvironmentRegistration, Registration, ScoredGroup
from tests.integration.run_api_calls import ENVIRONMENT, REGISTRATION, group

Interruption = Callable[[], Awaitable[None]]


class TroubledLink(RedisLink):
    """A link whose troubles a test chooses, by script."""

    def __init__(self, url: str, run_id: str) -> None:
        super().__init__(url, run_id, deadline_s=5.0)
        self.loses_answer_of: str | None = None
        self.repeats_scripts = False
        self.before: dict[str, Interruption] = {}

    async def script(self, name: str, keys: list[str], *arguments: Any) -> Any:
        if interruption := self.before.pop(name, None):
            await interruption()
        answer = await super().script(name, keys, *arguments)
        if self.repeats_scripts:
            answer = await super().script(name, keys, *arguments)
        if self.loses_answer_of == name:
            self.loses_answer_of = None
            raise StoreUnavailable("answer lost")
        return answer


class Run:
    """One run: its store, and two dispatchers as two replicas would have."""

    def __init__(self, link: TroubledLink) -> None:
        self.link = link
        self.store = RunStore(link)
        self.dispatcher = BatchDispatcher(self.store)
        self.replica = BatchDispatcher(self.store)

    async def register(self) -> None:
        await self.store.register(Registration.model_validate(REGISTRATION))

    async def submit(self, *markers: int) -> None:
        for marker in markers:
            assert (
                await self.store.submit(pack([ScoredGroup.model_validate(group(marker))])) is None
            )

    async def poll(self) -> list[int] | None:
        return group_ids(await self.dispatcher.next_batch())

    async def status(self) -> tuple[int, int]:
        status = await self.store.status()
        return status.current_step, status.queue_size


def group_ids(batch: LeasedBatch | None) -> list[int] | None:
    if batch is None:
        return None
    groups = [ScoredGroup.model_validate_json(unpack(payload)) for payload in batch.payloads]
    return [parsed.tokens[0][0] for parsed in groups]


@pytest.fixture
async def run(redis_url: str) -> AsyncIterator[Run]:
    run = Run(TroubledLink(redis_url, "store-tests"))
    await run.store.reset()
    await run.register()
    yield run
    await run.store.close()


@pytest.mark.parametrize("script", ["open_poll", "lease"])
async def test_batch_whose_answer_was_lost_is_not_acknowledged(run: Run, script: str) -> None:
    await run.submit(1, 2, 3, 4)
    run.link.loses_answer_of = script
    with pytest.raises(StoreUnavailable):
        await run.poll()
    assert await run.poll() == [1, 2]
    assert await run.status() == (1, 2)
    assert await run.poll() == [3, 4]


async def test_batch_lost_on_its_second_delivery_comes_a_third_time(run: Run) -> None:
    await run.submit(1, 2)
    assert await run.poll() == [1, 2]
    await run.register()
    run.link.loses_answer_of = "open_poll"
    with pytest.raises(StoreUnavailable):
        await run.poll()
    assert await run.poll() == [1, 2]
    assert await run.poll() is None


async def test_repeated_calls_happen_once(run: Run) -> None:
    run.link.repeats_scripts = True
    environment = EnvironmentRegistration.model_validate(ENVIRONMENT)
    await run.submit(1, 2, 3)
    assert await run.status() == (0, 3)
    assert await run.poll() == [1, 2]
    assert await run.status() == (1, 1)
    registered = await run.store.register_environment(environment)
    assert registered is not None
    assert registered.env_id == 0
    assert len(await run.store.environments()) == 1


async def test_plan_whose_groups_were_taken_is_made_again(run: Run) -> None:
    await run.submit(1, 2)

    async def another_replica_takes_them() -> None:
        assert group_ids(await run.replica.next_batch()) == [1, 2]
        assert await run.replica.next_batch() is None
        await run.submit(3, 4)

    run.link.before["lease"] = another_replica_takes_them
    assert await run.poll() == [3, 4]
    assert await run.status() == (2, 0)


async def test_poll_that_lost_the_race_takes_nothing(run: Run) -> None:
    await run.submit(1, 2, 3, 4)

    async def another_replica_leases() -> None:
        assert group_ids(await run.replica.next_batch()) == [1, 2]

    run.link.before["lease"] = another_replica_leases
    assert await run.poll() is None
    assert await run.status() == (1, 2)


@pytest.mark.parametrize("reset", [False, True])
async def test_poll_of_a_trainer_that_is_gone_takes_nothing(run: Run, reset: bool) -> None:
    await run.submit(1, 2)

    async def a_new_trainer_registers() -> None:
        if reset:
            await run.store.reset()
        await run.register()
        await run.submit(3, 4)

    run.link.before["lease"] = a_new_trainer_registers
    assert await run.poll() is None
    assert await run.poll() == ([3, 4] if reset else [1, 2])


async def test_nothing_is_left_of_acknowledged_groups(run: Run) -> None:
    for marker in range(0, 20, 2):
        await run.submit(marker, marker + 1)
        assert await run.poll() == [marker, marker + 1]
    assert await run.poll() is None
    assert await run.link.call("HLEN", f"{run.link.prefix}payloads") == 1  # the latest example
    _, counters = await run.store.environments_and_counters()
    assert counters.sequences_by_env == {}
    assert counters.max_group_size == 1
