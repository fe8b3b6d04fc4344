"""Takes scored groups in: place on metadata, commit in Redis, place again if it moved."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import structlog

from grpo_api.bundles import StoredGroup
from grpo_api.errors import GroupRefused, StoreUnavailable
from grpo_api.payloads import PackedGroup
from grpo_api.placement import Arrival, IntakeState, Placement, place
from grpo_api.servable import partners
from grpo_api.store import RunStore

_MAX_PLACEMENTS = 32
_log = structlog.get_logger()


class Intake:
    """What `POST /scored_data` does.

    Args:
        patience_s: how long a submission waits for others that met the same trouble before it.
    """

    def __init__(self, store: RunStore, patience_s: float) -> None:
        self._store = store
        self._patience_s = patience_s
        self._turns = asyncio.Lock()

    async def submit(self, groups: Sequence[PackedGroup]) -> list[int | None]:
        """Take all groups, or none of them.

        Returns:
            For each group the sequences that its environment has buffered after it, or None where
            it was queued as it came.
        Raises:
            GroupRefused: the first group that cannot be taken.
            Refused: 409, no trainer has registered.
            StoreUnavailable: Redis is away, or the run changes faster than it is read.
        """
        if not groups:
            return []
        placement = await self._try(groups)
        return (placement or await self._try_in_turn(groups)).buffered_sequences

    async def _try_in_turn(self, groups: Sequence[PackedGroup]) -> Placement:
        """Parts of one environment meet in its buffer: sent side by side and placed side by side,
        all but one of them would start over each time."""
        async with self._turn():
            for _ in range(_MAX_PLACEMENTS):
                placement = await self._try(groups)
                if placement is not None:
                    return placement
        raise StoreUnavailable(
            f"the run changed {_MAX_PLACEMENTS} times while groups were placed; send them again"
        )

    async def _try(self, groups: Sequence[PackedGroup]) -> Placement | None:
        """None where the run moved between reading and committing."""
        env_ids = sorted({group.env_id for group in groups if group.env_id is not None})
        opened = await self._store.groups.open_intake(env_ids, len(groups))
        arrivals = [
            Arrival(group.env_id, StoredGroup(id_, group.sequences, len(group.payload)))
            for id_, group in enumerate(groups, start=opened.first_id)
        ]
        try:
            placement = place(arrivals, await self._with_partners(opened.state, arrivals))
        except GroupRefused as error:
            env_id = groups[error.index].env_id
            _log.warning("group refused", env_id=env_id, index=error.index, reason=str(error))
            raise
        payloads = [group.payload for group in groups]
        return placement if await self._store.groups.commit(opened, placement, payloads) else None

    async def _with_partners(self, state: IntakeState, arrivals: Sequence[Arrival]) -> IntakeState:
        """Sizes that divide the batch, the usual case, need no look at who else is there."""
        if all(state.fills_batch_alone(arrival) for arrival in arrivals):
            return state
        run = await self._store.environments.view()
        sizes = [environment.registration.group_size for environment in run.connected()]
        others = partners(state.batch_size, sizes, run.counters.queued)
        return replace(state, partners=others)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._patience_s):
                await self._turns.acquire()
        except TimeoutError as error:
            raise StoreUnavailable(
                f"groups that arrived earlier were not placed within {self._patience_s:g} s"
            ) from error
        try:
            yield
        finally:
            self._turns.release()
