"""Stores the trainer's registration and reads the status of the run."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import lru_cache

from grpo_api.errors import Refused, unprocessable
from grpo_api.planning.batch import why_unservable
from grpo_api.planning.run import Environment, Fill, RunCounters, RunView
from grpo_api.store.keys import RECEIPT_S, former_keys, parse_kind, receipt_key
from grpo_api.store.redis import RedisLink
from grpo_api.store.results import BatchSizeDiffers, Registered, RegisteredEnvironment
from grpo_core.redis.keys import served_weights_followers_key, served_weights_key
from grpo_core.wire.run_api import EnvironmentRegistration, Registration, RunStatus


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


GONE_TIMEOUTS = 60
"""An environment that has sent no poll for this many timeouts is deleted when another one
registers, so that polls do not read all that ever registered."""


class EnvironmentStore:
    def __init__(self, link: RedisLink, timeout_s: float) -> None:
        self._link = link
        self._timeout_ms = timeout_s * 1000
        self._gone_ms = GONE_TIMEOUTS * self._timeout_ms

    async def register(
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
        counters = RunCounters(
            current_step=int(step or 0),
            batch_size=int(batch_size or 0),
            queued={parse_kind(kind): int(n) for kind, n in _pairs(kinds).items()},
            max_group_size=max(map(int, sizes), default=1),
            fill=Fill(queued_groups, queued_bytes + buffered_bytes),
            num_steps=None if ends_at is None else int(ends_at),
        )
        name_of, seen_ms = _pairs(names), _pairs(seen)
        here = {e for e in connected if int(now_ms) - int(seen_ms[e]) <= self._timeout_ms}
        environments = [
            Environment(int(e), name_of[e].decode(), e in here, _registration(written))
            for e, written in _pairs(registrations).items()
        ]
        return RunView(sorted(environments, key=lambda known: known.env_id), counters)


@lru_cache(maxsize=4096)
def _registration(written: bytes) -> EnvironmentRegistration:
    """Parse a registration; cached, because every poll reads all of them."""
    return EnvironmentRegistration.model_validate_json(written)


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
