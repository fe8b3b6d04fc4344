"""Scored groups on their way into the queue."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from grpo_api.errors import Refused
from grpo_api.placement import IntakeState, Placement
from grpo_api.records import OpenIntake
from grpo_api.redis_link import RedisLink
from grpo_api.store.keys import RECEIPT_S, keys, parse_groups, receipt, write_bundle, write_groups
from grpo_core.wire import EnvironmentRegistration


class GroupStore:
    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def open_intake(self, env_ids: Sequence[int], groups: int) -> OpenIntake:
        """Reserve an id for each of `groups` groups, and read what placing them depends on.

        Raises:
            Refused: 409, no trainer has registered.
        """
        trainer, last_id, environments, buffers = keys(
            self._link, "trainer", "last_group_id", "environments", "buffers"
        )
        commands: list[tuple[Any, ...]] = [
            ("HMGET", trainer, "id", "batch_size"),
            ("INCRBY", last_id, groups),
        ]
        if env_ids:
            commands += [("HMGET", environments, *env_ids), ("HMGET", buffers, *env_ids)]
        (trainer_id, batch_size), last, *by_env = await self._link.transaction(*commands)
        if batch_size is None:
            raise Refused(409, "no trainer has registered; POST /register comes before any data")
        registrations, buffered = by_env or ([], [])
        state = IntakeState(
            batch_size=int(batch_size),
            group_size_of={
                env_id: EnvironmentRegistration.model_validate_json(found).group_size
                for env_id, found in zip(env_ids, registrations, strict=True)
                if found
            },
            buffers={
                env_id: parse_groups(found.decode())
                for env_id, found in zip(env_ids, buffered, strict=True)
                if found
            },
        )
        return OpenIntake(trainer_id, first_id=last - groups + 1, state=state)

    async def commit(
        self, intake: OpenIntake, placement: Placement, payloads: Sequence[bytes]
    ) -> bool:
        """Carry out the placement, all or nothing; False where what it was decided on has moved."""
        before = intake.state.buffers
        plan = {
            "buffers": [
                [str(env_id), write_groups(before.get(env_id, ())), write_groups(after)]
                for env_id, after in placement.buffers.items()
            ],
            "bundles": [write_bundle(bundle) for bundle in placement.bundles],
        }
        outcome = await self._link.script(
            "submit",
            keys(
                self._link,
                *("trainer", "buffers", "queue", "payloads"),
                *("queued_kinds", "queued_sizes", "latest", receipt()),
            ),
            RECEIPT_S,
            intake.trainer_id,
            json.dumps(plan),
            intake.first_id,
            *payloads,
        )
        return bool(outcome == b"placed")

    async def latest_payload(self) -> bytes | None:
        """The last group queued, whether or not it has been served since."""
        payload: bytes | None = await self._link.script(
            "latest_payload", keys(self._link, "latest", "payloads")
        )
        return payload
