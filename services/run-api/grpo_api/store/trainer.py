"""Stores the trainer's registration and reads the status of the run."""

from __future__ import annotations

import uuid

from grpo_api.errors import Refused
from grpo_api.store.keys import former_keys
from grpo_api.store.redis import RedisLink
from grpo_api.store.results import BatchSizeDiffers, Registered
from grpo_core.redis.keys import served_weights_followers_key, served_weights_key
from grpo_core.wire.run_api import Registration, RunStatus


class TrainerStore:
    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def register(
        self, registration: Registration, approved: bytes = b""
    ) -> Registered | BatchSizeDiffers:
        """Register a trainer, unless that changes the run's batch size.

        Args:
            approved: fingerprint of a state for which the new batch size was approved. The size
                changes if the run is still in that state.
        Raises:
            Refused: 409, an older version of run-api stored this run in a previous layout.
        """
        trainer_id = uuid.uuid4()
        outcome, *rest = await self._link.script(
            "register_trainer",
            ("trainer", "connected", "queued_kinds", "leases", "answers", "refusals"),
            registration.model_dump_json(),
            registration.batch_size,
            registration.starting_step,
            trainer_id.hex,
            approved,
            uuid.uuid4().hex,
            others=former_keys(self._link, "trainer"),
        )
        if outcome == b"registered":
            step, run_uuid = rest
            await self._follow(registration.server_run_id)
            return Registered(trainer_id.int, int(step), run_uuid.decode())
        if outcome == b"former layout":
            raise Refused(
                409,
                "an older release of run-api stored this run in a format that this release cannot "
                "read; finish the run with the older release, use another run id, or delete the "
                "run with GET /reset_data",
            )
        return BatchSizeDiffers(*rest)

    async def _follow(self, server_run_id: str | None) -> None:
        """Let the inference server of another run id write its served version to this run too."""
        own, pointer = self._link.served_weights, self._link.followed_server
        source = served_weights_key(server_run_id) if server_run_id is not None else own
        wanted = "" if source == own else server_run_id or ""
        followed = (await self._link.call("GET", pointer) or b"").decode()
        if followed == wanted:
            return
        commands: list[tuple[str, ...]] = [("UNLINK", own), ("SET", pointer, wanted)]
        if followed:
            commands.append(("SREM", served_weights_followers_key(followed), own))
        if wanted:
            commands.append(("SADD", served_weights_followers_key(wanted), own))
            commands.append(("COPY", source, own))
        await self._link.transaction(*commands)

    async def registration(self) -> Registration | None:
        (trainer,) = self._link.keys("trainer")
        found = await self._link.call("HGET", trainer, "registration")
        return Registration.model_validate_json(found) if found else None

    async def status(self) -> RunStatus:
        trainer, totals, refusals = self._link.keys("trainer", "totals", "refusals")
        (step, run_uuid), groups, (refused, reason) = await self._link.transaction(
            ("HMGET", trainer, "step", "run_uuid"),
            ("HGET", totals, "queued_groups"),
            ("HMGET", refusals, "groups", "last"),
        )
        return RunStatus(
            current_step=int(step or 0),
            queue_size=int(groups or 0),
            run_uuid=run_uuid.decode() if run_uuid else None,
            refused_groups=int(refused or 0),
            last_refusal=(reason or b"").decode(),
        )
