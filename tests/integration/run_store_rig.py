"""A run without HTTP: two replicas of run-api, and a Redis link that can fail on demand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock

from grpo_api.batches import next_batch
from grpo_api.errors import StoreUnavailable
from grpo_api.intake import Intake
from grpo_api.planning.run_view import QueueLimits
from grpo_api.store.leases import Lease, Poll
from grpo_api.store.payloads import pack, unpack
from grpo_api.store.queue import Outcomes, Submission
from grpo_api.store.redis import RedisLink
from grpo_api.store.run import RunStore
from grpo_core.wire.run_api import EnvironmentRegistration, Registration
from grpo_core.wire.scored_group import ScoredGroup
from tests.integration.run_api_calls import ENVIRONMENT, REGISTRATION, group
from tests.support.wait import DEADLINE_S, wait_for_async

Interruption = Callable[[], Awaitable[object]]

TIMEOUT_S = 60.0
"""An environment counts as disconnected after this long without a poll."""

LIMITS = QueueLimits(queued_groups=1000, queued_bytes=2**30)
LEASED_BYTES = 2**30
SHORT_WAIT_S = 0.3
"""Submissions wait only briefly while the queue is full."""
HELD_BYTES = 2**20
LARGE = {"images": random.Random(0).randbytes(1_500_000).hex()}
"""A group with this text is stored as more than 1 MB, so it is staged in pieces."""


class TroubledLink(RedisLink):
    """A link to Redis that fails for the scripts or commands that a test chooses."""

    def __init__(self, url: str, run_id: str) -> None:
        super().__init__(url, run_id, deadline_s=DEADLINE_S)
        self.loses_answer_of: str | None = None
        self.repeats_scripts = False
        self.before: dict[str, Interruption] = {}

    async def call(self, *command: Any) -> Any:
        if interruption := self.before.pop(command[0], None):
            await interruption()
        return await super().call(*command)

    async def script(self, name: str, *arguments: Any, own_keys: Sequence[str] = ()) -> Any:
        if interruption := self.before.pop(name, None):
            await interruption()
        answer = await super().script(name, *arguments, own_keys=own_keys)
        if self.repeats_scripts:
            answer = await super().script(name, *arguments, own_keys=own_keys)
        if self.loses_answer_of == name:
            self.loses_answer_of = None
            raise StoreUnavailable("answer lost")
        return answer


class Run:
    """One run: its store, and the parts of two run-api processes."""

    def __init__(self, link: TroubledLink, limits: QueueLimits, full_s: float, leased: int) -> None:
        self.link = link
        self.closing = asyncio.Event()
        self.trainer_id = 0
        self.store, self.replica = (RunStore(link, TIMEOUT_S, leased) for _ in range(2))
        self.intake, self.intake_of_replica = (
            Intake(store, limits, self.closing, full_s=full_s, held_bytes=HELD_BYTES)
            for store in (self.store, self.replica)
        )

    async def register(self, **changes: Any) -> None:
        registration = Registration.model_validate(REGISTRATION | changes)
        enrolled, _ = await self.store.register_trainer(registration)
        self.trainer_id = enrolled.uuid

    async def start_environment(self, **changes: Any) -> int:
        """Register an environment after the trainer has polled."""
        await self.poll()
        registered = await self.store.register_environment(
            EnvironmentRegistration.model_validate(ENVIRONMENT | changes)
        )
        assert registered is not None
        return registered["env_id"]

    async def submit(
        self, *markers: int, replica: bool = False, key: str | None = None, **changes: Any
    ) -> list[Outcomes]:
        """Submit one group per marker, each as a separate submission."""
        intake = self.intake_of_replica if replica else self.intake
        groups = [ScoredGroup.model_validate(group(marker, **changes)) for marker in markers]
        return [
            await intake.submit(
                Submission([pack(one)], one.model_dump_json(), key), AsyncMock(return_value=False)
            )
            for one in groups
        ]

    async def poll(self, *, replica: bool = False, delivered: bool = True) -> list[int] | None:
        """Make a plain poll, like an Atropos trainer.

        Args:
            delivered: False if the trainer does not receive the whole answer.
        """
        async with self.answer(replica=replica) as lease:
            markers = await self.markers(lease)
            if lease is not None and delivered:
                await self.store.leases.mark_delivered(lease)
        return markers

    @asynccontextmanager
    async def answer(self, *, replica: bool = False) -> AsyncIterator[Lease | None]:
        """The answer to a plain poll, which is being sent during the block."""
        async with self.store.leases.claim() as claim:
            store = self.replica if replica else self.store
            yield await next_batch(store, self.closing, Poll(claim=claim), wait_s=0.0)

    async def lease(
        self, after: int, *, replica: bool = False, wait_s: float = 0
    ) -> list[int] | None:
        """The groups of the batch after `after`, leased by the current trainer."""
        store, poll = self.replica if replica else self.store, Poll(self.trainer_id, after)
        return await self.markers(await next_batch(store, self.closing, poll, wait_s))

    async def acknowledge(self, batch_id: int) -> tuple[int, int]:
        """The last acknowledged batch, and the number of deleted batches."""
        done = await self.store.leases.acknowledge(self.trainer_id, batch_id)
        return done["acknowledged"], done["released"]

    async def markers(self, lease: Lease | None) -> list[int] | None:
        if lease is None:
            return None
        ids = [stored.id for stored in lease.groups]
        payloads = [found async for found in self.store.payloads.load(ids)]
        assert None not in payloads
        groups = [ScoredGroup.model_validate_json(unpack(found)) for found in payloads if found]
        return [parsed.tokens[0][0] for parsed in groups]

    async def status(self) -> tuple[int, int]:
        status = await self.store.status()
        return status.current_step, status.queue_size

    def waiting(self) -> int:
        """Submissions that wait for room in the queue."""
        return len(self.intake._line)

    async def submit_to_the_line(self, marker: int) -> asyncio.Task[list[Outcomes]]:
        """Submit to a full queue; returns when the group waits in line."""
        before = self.waiting()
        held = asyncio.create_task(self.submit(marker))
        await wait_for_async(self.waiting, lambda waiting: waiting > before)
        return held

    async def payloads(self) -> int:
        count: int = await self.link.call("HLEN", f"{self.link.prefix}payloads")
        return count

    async def staged(self) -> list[bytes]:
        """Redis keys of staged groups."""
        found: list[bytes] = await self.link.call("KEYS", f"{self.store.payloads.staged_prefix}*")
        return found


@asynccontextmanager
async def open_run(
    redis_url: str,
    run_id: str,
    limits: QueueLimits = LIMITS,
    full_s: float = SHORT_WAIT_S,
    max_leased_bytes: int = LEASED_BYTES,
) -> AsyncIterator[Run]:
    """A run with a trainer and no groups."""
    run = Run(TroubledLink(redis_url, run_id), limits, full_s, max_leased_bytes)
    await run.store.reset()
    await run.register()
    yield run
    await run.store.link.close()
