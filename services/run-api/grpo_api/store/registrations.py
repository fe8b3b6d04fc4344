"""Stores who takes part in a run: the trainer and the environments, and reads the run's state."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from grpo_api.errors import Refused, StoreUnavailable, unprocessable
from grpo_api.planning.batch_plan import batch_size_conflicts, why_unservable
from grpo_api.planning.run_view import Environment, RunView
from grpo_api.store.keys import RECEIPT_S, former_keys, parse_kind, receipt_key
from grpo_api.store.redis import RedisLink
from grpo_core.redis.keys import served_weights_followers_key, served_weights_key
from grpo_core.wire.run_api import EnvironmentRegistration, Registration, RunStatus

GONE_TIMEOUTS = 60
"""An environment that has sent no poll for this many timeouts is deleted when another one
registers, so that polls do not read all that ever registered."""


@dataclass(frozen=True)
class RegisteredTrainer:
    """A trainer's id (128 bits), and the step and uuid of its run."""

    trainer_id: int
    step: int
    run_uuid: str


@dataclass(frozen=True)
class RegisteredEnvironment:
    """`step`, `trainer` and `run_uuid`: of the run that it takes part in."""

    env_id: int
    name: str
    step: int
    trainer: Registration
    run_uuid: str


class RegistrationStore:
    """
    Args:
        timeout_s: an environment counts as disconnected after this long without a poll.
    """

    def __init__(self, link: RedisLink, timeout_s: float) -> None:
        self._link = link
        self._timeout_ms = timeout_s * 1000
        self._gone_ms = GONE_TIMEOUTS * self._timeout_ms

    async def register_trainer(self, registration: Registration) -> RegisteredTrainer:
        """Register a trainer. If that changes the batch size of the run, check first that the
        queue, the environments and the leases fit the new one.

        Raises:
            Refused: 409, they do not fit, or an older version of run-api stored this run in a
                previous layout.
            StoreUnavailable: Redis is unreachable, or the run changed during the check.
        """
        trainer_id = uuid.uuid4()
        outcome, *rest = await self._register_trainer(registration, trainer_id)
        if outcome == b"differs":
            current, unacknowledged, fingerprint = rest
            await self._check_batch_size(registration.batch_size, current, unacknowledged)
            outcome, *rest = await self._register_trainer(registration, trainer_id, fingerprint)
        if outcome == b"differs":
            raise StoreUnavailable(
                "the queue or the environments changed while run-api checked batch_size "
                f"{registration.batch_size}; register again"
            )
        if outcome == b"former layout":
            raise Refused(
                409,
                "an older release of run-api stored this run in a format that this release cannot "
                "read; finish the run with the older release, use another run id, or delete the "
                "run with GET /reset_data",
            )
        step, run_uuid = rest
        await self._follow(registration.server_run_id)
        return RegisteredTrainer(trainer_id.int, int(step), run_uuid.decode())

    async def _register_trainer(
        self, registration: Registration, trainer_id: uuid.UUID, approved: bytes = b""
    ) -> Any:
        """
        Args:
            approved: fingerprint of a state for which the new batch size was approved. The size
                changes if the run is still in that state.
        """
        return await self._link.script(
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

    async def _check_batch_size(self, batch_size: int, current: int, unacknowledged: int) -> None:
        run = await self.view()
        group_size_of = {own.env_id: own.kind.sequences for own in run.connected()}
        reasons = batch_size_conflicts(batch_size, group_size_of, run.queued)
        if unacknowledged:
            reasons.insert(0, f"{unacknowledged} batches of {current} sequences are unacknowledged")
        if reasons:
            raise Refused(
                409,
                f"the run's batch_size cannot change from {current} to {batch_size}, because "
                f"{'; '.join(reasons)}. Register with batch_size {current}, use another run "
                "id, or clear the run with GET /reset_data",
            )

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

    async def trainer(self) -> Registration | None:
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

    async def register_environment(
        self, registration: EnvironmentRegistration, key: str | None = None
    ) -> RegisteredEnvironment | None:
        """None until a trainer has registered and polled once.

        Args:
            key: idempotency key; a repeated call returns the same environment.
        Raises:
            Refused: 422, the group size does not divide the batch size.
        """
        outcome, *rest = await self._link.script(
            "register_environment",
            (
                *("trainer", "environments", "environment_names", "name_counts", "connected"),
                *("seen", "group_sizes", "resets", "last_env_id", "buffers", "payloads"),
                *("totals", "large", receipt_key(key and f"environment {key}")),
            ),
            registration.model_dump_json(),
            registration.desired_name,
            registration.group_size,
            RECEIPT_S,
            int(self._gone_ms),
        )
        if outcome == b"wait":
            return None
        if outcome == b"unservable":
            reason = why_unservable(registration.group_size, batch_size=rest[0])
            raise unprocessable(["group_size"], str(reason))
        env_id, name, step, trainer, run_uuid = rest
        return RegisteredEnvironment(
            env_id,
            name.decode(),
            step,
            Registration.model_validate_json(trainer),
            run_uuid.decode(),
        )

    async def disconnect(self, env_id: int) -> int | None:
        """Delete the environment and its buffered parts, which nothing can complete now.

        Returns the number of dropped parts; None if no environment ever had this id.
        """
        dropped: int | None = await self._link.script(
            "disconnect_environment",
            (
                *("environments", "environment_names", "group_sizes", "connected", "seen"),
                *("buffers", "payloads", "totals", "large", "last_env_id"),
            ),
            env_id,
        )
        return dropped

    async def view(self, polling: int | None = None) -> RunView:
        """One consistent view of the run. Its cost does not grow with the queue.

        Args:
            polling: the environment that asks; its time of last poll is updated.
        """
        answer = await self._link.script(
            "view_run",
            (
                *("trainer", "environments", "environment_names", "connected", "seen"),
                *("queued_kinds", "queued_sizes", "totals"),
            ),
            "" if polling is None else polling,
        )
        now_ms, trainer, registrations, names, connected, seen, kinds, sizes, totals = answer
        step, batch_size, ends_at = trainer
        queued_groups, queued_bytes, buffered_bytes = (int(total or 0) for total in totals)
        name_of, seen_ms = _pairs(names), _pairs(seen)
        here = {e for e in connected if int(now_ms) - int(seen_ms[e]) <= self._timeout_ms}
        environments = [
            Environment(int(e), name_of[e].decode(), e in here, _registration(written))
            for e, written in _pairs(registrations).items()
        ]
        return RunView(
            environments=sorted(environments, key=lambda known: known.env_id),
            current_step=int(step or 0),
            batch_size=int(batch_size or 0),
            queued={parse_kind(kind): int(n) for kind, n in _pairs(kinds).items()},
            max_group_size=max(map(int, sizes), default=1),
            queued_groups=queued_groups,
            stored_bytes=queued_bytes + buffered_bytes,
            num_steps=None if ends_at is None else int(ends_at),
        )


@lru_cache(maxsize=4096)
def _registration(written: bytes) -> EnvironmentRegistration:
    """Parse a registration; cached, because every poll reads all of them."""
    return EnvironmentRegistration.model_validate_json(written)


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
