"""A run on its store alone: two replicas of run-api, and a link to Redis that tests may trouble."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from grpo_api.dispatch import BatchDispatcher
from grpo_api.enrolment import enrol_trainer
from grpo_api.errors import StoreUnavailable
from grpo_api.intake import Intake
from grpo_api.payloads import pack, unpack
from grpo_api.records import LeasedBatch
from grpo_api.redis_link import RedisLink
from grpo_api.store import RunStore
from grpo_core.wire import EnvironmentRegistration, Registration, ScoredGroup
from tests.integration.run_api_calls import ENVIRONMENT, REGISTRATION, group

Interruption = Callable[[], Awaitable[None]]

TIMEOUT_S = 60.0
"""Silence after which an environment counts as gone."""


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
    """One run: its store, and what two replicas of run-api would have."""

    def __init__(self, link: TroubledLink) -> None:
        self.link = link
        self.store = RunStore(link, TIMEOUT_S)
        self.dispatcher = BatchDispatcher(self.store)
        self.replica = BatchDispatcher(self.store)
        self.intake = Intake(self.store, patience_s=5.0)
        self.intake_of_replica = Intake(self.store, patience_s=5.0)

    async def register(self, **changes: Any) -> None:
        await enrol_trainer(self.store, Registration.model_validate(REGISTRATION | changes))

    async def start_environment(self, **changes: Any) -> int:
        """Register an environment; the trainer is known to have polled."""
        await self.poll()
        registered = await self.store.environments.register(
            EnvironmentRegistration.model_validate(ENVIRONMENT | changes)
        )
        assert registered is not None
        return registered.env_id

    async def submit(self, *markers: int, replica: bool = False, **changes: Any) -> None:
        intake = self.intake_of_replica if replica else self.intake
        for marker in markers:
            await intake.submit(pack([ScoredGroup.model_validate(group(marker, **changes))]))

    async def poll(self) -> list[int] | None:
        return group_ids(await self.dispatcher.next_batch())

    async def status(self) -> tuple[int, int]:
        status = await self.store.trainer.status()
        return status.current_step, status.queue_size

    async def stay_silent(self, env_id: int, seconds: float) -> None:
        """Let the environment's last poll be that long ago."""
        seen = f"{self.link.prefix}seen"
        await self.link.call("HINCRBY", seen, env_id, -int(seconds * 1000))

    async def payloads(self) -> int:
        count: int = await self.link.call("HLEN", f"{self.link.prefix}payloads")
        return count


def group_ids(batch: LeasedBatch | None) -> list[int] | None:
    if batch is None:
        return None
    groups = [ScoredGroup.model_validate_json(unpack(payload)) for payload in batch.payloads]
    return [parsed.tokens[0][0] for parsed in groups]


@asynccontextmanager
async def open_run(redis_url: str, run_id: str) -> AsyncIterator[Run]:
    """A run of which nothing is known but its trainer."""
    run = Run(TroubledLink(redis_url, run_id))
    await run.store.reset()
    await run.register()
    yield run
    await run.store.close()
