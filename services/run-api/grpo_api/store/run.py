"""Stores who takes part in a run, and reads the run's state. Only this package uses its keys.

Every change to more than one key is one Lua script, so several run-api processes can share a run.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import structlog
from typing_extensions import TypedDict  # pydantic accepts `typing.TypedDict` from Python 3.12 on

from grpo_api.errors import Refused, StoreUnavailable, unprocessable
from grpo_api.planning.batch_plan import batch_size_conflicts, why_unservable
from grpo_api.planning.run_view import Environment, RunView
from grpo_api.store.keys import RECEIPT_S, parse_kind, receipt_key
from grpo_api.store.leases import Leases
from grpo_api.store.payloads import PayloadStore
from grpo_api.store.queue import GroupQueue
from grpo_api.store.redis import RedisLink
from grpo_api.store.servers import ServerRecords
from grpo_core.redis.keys import served_weights_followers_key, served_weights_key
from grpo_core.wire.run_api import (
    EnvironmentCount,
    EnvironmentRegistration,
    Registration,
    RunStatus,
    TrainerEnrolled,
)

GONE_TIMEOUTS = 60
"""An environment that has sent no poll for this many timeouts is deleted when another one
registers, so that polls do not read all that ever registered."""
MAX_REASON_CHARS = 300
_COUNTING_S = 1.0
_RECEIPT_WITHOUT_KEY_S = 10
"""Longer than `_COUNTING_S`, within which one call may repeat its command. Short, so that a flood
of invalid requests does not fill Redis."""
log = structlog.get_logger()


class EnvironmentEnrolled(TypedDict):
    """The environment is registered. `item_positions`: items that environments of the run have
    used, as they sent them with their groups."""

    status: Literal["success"]
    env_id: int
    wandb_name: str
    checkpoint_dir: str
    starting_step: int
    checkpoint_interval: int
    num_steps: int
    run_uuid: str
    item_positions: dict[str, str]


class RunStats(NamedTuple):
    """Counters of a run at one moment, in the order in which `read_stats` returns them.

    `metrics` says what they mean. `last_refusal` is as in `EnvironmentCount`; `run_uuid` is "" if
    there is no run.
    """

    step: int
    batches_delivered: int
    batches_acknowledged: int
    batches_redelivered: int
    num_steps: int
    queued_groups: int
    queued_sequences: int
    queued_bytes: int
    buffered_parts: int
    buffered_bytes: int
    leased_bytes: int
    oldest_lease_age_seconds: float
    oldest_queued_group_age_seconds: float
    environments_alive: int
    environments_registered: int
    leased_batches: int
    refused_groups: int
    lost_groups: int
    last_refusal: str
    run_uuid: str


class RunStore:
    """One run in Redis. Every method raises `StoreUnavailable` if Redis does not answer within the
    deadline.

    Args:
        environment_timeout_s: an environment counts as disconnected after this long without a poll.
        max_leased_bytes: limit on the stored bytes of unacknowledged batches.
    """

    def __init__(
        self, link: RedisLink, environment_timeout_s: float, max_leased_bytes: int
    ) -> None:
        self.link = link
        self._timeout_ms = int(environment_timeout_s * 1000)
        self.payloads = PayloadStore(link)
        self.queue = GroupQueue(link, self.payloads)
        self.leases = Leases(link, max_leased_bytes)
        self.servers = ServerRecords(link)

    async def reset(self) -> None:
        await self.link.script("reset")

    async def register_trainer(self, registration: Registration) -> tuple[TrainerEnrolled, int]:
        """Register a trainer. If that changes the batch size of the run, check first that the
        queue, the environments and the leases fit the new one.

        Returns:
            The trainer's id and run, and the step of the run.
        Raises:
            Refused: 409, they do not fit.
            StoreUnavailable: Redis is unreachable, or the run changed during the check.
        """
        trainer_id, run_uuid = uuid.uuid4(), uuid.uuid4().hex
        approved = b""  # fingerprint of a state for which the new batch size was approved
        for _ in range(2):
            outcome, *rest = await self.link.script(
                "register_trainer",
                registration.model_dump_json(),
                registration.batch_size,
                registration.starting_step,
                trainer_id.hex,
                approved,
                run_uuid,
            )
            if outcome == b"registered":
                step, run = rest
                await self._follow(registration.server_run_id)
                self.servers.forget()
                return TrainerEnrolled(uuid=trainer_id.int, run_uuid=run.decode()), int(step)
            current, unacknowledged, approved = rest
            await self._check_batch_size(registration.batch_size, current, unacknowledged)
        raise StoreUnavailable(
            f"the run changed while batch_size {registration.batch_size} was checked; try again"
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
        own, pointer = self.link.served_weights, self.link.followed_server
        source = served_weights_key(server_run_id) if server_run_id is not None else own
        wanted = "" if source == own else server_run_id or ""
        followed = (await self.link.call("GET", pointer) or b"").decode()
        if followed == wanted:
            return
        commands: list[tuple[str, ...]] = [("UNLINK", own), ("SET", pointer, wanted)]
        if followed:
            commands.append(("SREM", served_weights_followers_key(followed), own))
        if wanted:
            commands.append(("SADD", served_weights_followers_key(wanted), own))
            commands.append(("COPY", source, own))
        await self.link.transaction(*commands)

    async def trainer(self) -> Registration | None:
        (trainer,) = self.link.keys("trainer")
        found = await self.link.call("HGET", trainer, "registration")
        return Registration.model_validate_json(found) if found else None

    async def register_environment(
        self, registration: EnvironmentRegistration, key: str | None = None
    ) -> EnvironmentEnrolled | None:
        """None until a trainer has registered and polled once.

        Args:
            key: idempotency key; a repeated call returns the same environment.
        Raises:
            Refused: 422, the group size does not divide the batch size.
        """
        outcome, *rest = await self.link.script(
            "register_environment",
            registration.model_dump_json(),
            registration.desired_name,
            registration.group_size,
            RECEIPT_S,
            GONE_TIMEOUTS * self._timeout_ms,
            own_keys=self.link.keys(receipt_key(key and f"environment {key}")),
        )
        if outcome == b"wait":
            return None
        if outcome == b"unservable":
            reason = why_unservable(registration.group_size, batch_size=rest[0])
            raise unprocessable(["group_size"], str(reason))
        env_id, name, step, written, run_uuid, positions = rest
        trainer = Registration.model_validate_json(written)
        return {
            "status": "success",
            "env_id": env_id,
            "wandb_name": name.decode(),
            "checkpoint_dir": trainer.checkpoint_dir,
            "starting_step": step,
            "checkpoint_interval": trainer.save_checkpoint_interval,
            "num_steps": trainer.num_steps,
            "run_uuid": run_uuid.decode(),
            "item_positions": {
                name.decode(): ranges.decode() for name, ranges in _pairs(positions).items()
            },
        }

    async def disconnect(self, env_id: int) -> int | None:
        """Delete the environment and its buffered parts, which nothing can complete now.

        Returns the number of dropped parts; None if no environment ever had this id.
        """
        dropped: int | None = await self.link.script("disconnect_environment", env_id)
        return dropped

    async def view(self, polling: int | None = None) -> RunView:
        """One consistent view of the run. Its cost does not grow with the queue.

        Args:
            polling: the environment that asks; its time of last poll is updated.
        """
        answer = await self.link.script("view_run", "" if polling is None else polling)
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

    async def status(self) -> RunStatus:
        stats = await self.stats()
        return RunStatus(
            current_step=stats.step,
            queue_size=stats.queued_groups,
            run_uuid=stats.run_uuid or None,
            last_batch=stats.batches_delivered,
            refused_groups=stats.refused_groups,
            last_refusal=stats.last_refusal,
            lost_groups=stats.lost_groups,
        )

    async def environments(self) -> EnvironmentCount:
        stats = await self.stats()
        return EnvironmentCount(
            registered=stats.environments_registered,
            connected=stats.environments_alive,
            refused_groups=stats.refused_groups,
            last_refusal=stats.last_refusal,
            lost_groups=stats.lost_groups,
        )

    async def stats(self) -> RunStats:
        """All counters at one moment. The cost does not grow with the queue."""
        answer = await self.link.script("read_stats", self._timeout_ms)
        stats = RunStats(*answer)
        return stats._replace(
            oldest_lease_age_seconds=stats.oldest_lease_age_seconds / 1000,
            oldest_queued_group_age_seconds=stats.oldest_queued_group_age_seconds / 1000,
            last_refusal=answer[-2].decode(),
            run_uuid=answer[-1].decode(),
        )

    async def count_refusal(
        self, reason: str, groups: int = 1, env_id: int | None = None, key: str | None = None
    ) -> None:
        """Count the groups of one refused submission. A failure is only logged, because the sender
        needs the reason for the refusal and not that of the failure.

        Args:
            groups: 1 for a body that could not be read.
            env_id: None if it is unknown.
            key: idempotency key of the submission.
        """
        line = refusal_line(reason, env_id)
        # The same key may come with other groups, for another reason.
        receipt = receipt_key(key and f"refusal {key} {line}")
        try:
            async with asyncio.timeout(_COUNTING_S):
                await self.link.script(
                    "count_refusal",
                    RECEIPT_S if key else _RECEIPT_WITHOUT_KEY_S,
                    groups,
                    line,
                    own_keys=self.link.keys(receipt),
                )
        except (StoreUnavailable, TimeoutError) as error:
            log.warning("refusal.not_counted", refusal=line, reason=str(error))


@lru_cache(maxsize=4096)
def _registration(written: bytes) -> EnvironmentRegistration:
    """Parse a registration; cached, because every poll reads all of them."""
    return EnvironmentRegistration.model_validate_json(written)


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def refusal_line(reason: str, env_id: int | None = None) -> str:
    """The first line of the reason, without control characters, which could change a terminal.

    The reason may quote names from the body.
    """
    sender = "" if env_id is None else f"env_id {env_id}: "
    first = reason.strip().split("\n", 1)[0]
    shown = "".join(char if char.isprintable() else "?" for char in first)
    return (sender + shown)[:MAX_REASON_CHARS]
