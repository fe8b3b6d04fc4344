"""The run's state in Redis. The only module that knows its keys and talks to it.

    trainer            hash   registration (JSON), batch_size, id, step, started
    environments       hash   env_id → registration (JSON)
    environment_names  hash   env_id → name
    name_counts        hash   desired name → environments that asked for it
    connected          set    env_ids
    queue              zset   "id env_id sequences stored_bytes", scored by id: oldest first
    payloads           hash   group id → compressed JSON, queued and leased groups
    sequences_by_env   hash   env_id or "-" → sequences in the queue
    sequences_by_size  hash   group size → sequences in the queue
    lease              hash   poll, groups (ids), sequences, step: the batch handed out last
    latest             hash   id of the last queued group; acknowledged: its batch is done
    last_group_id      string
    receipt:<id>       string answers to calls that must not happen twice, short-lived

Everything that changes more than one key is one script, so replicas of run-api may share a run.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from grpo_api.allocation import Environment, RunCounters
from grpo_api.batching import QueuedGroup
from grpo_api.errors import Refused, TrainerNotRegistered, unprocessable
from grpo_api.payloads import PackedGroup
from grpo_api.records import (
    LeasedBatch,
    LeaseLost,
    OpenPoll,
    RegisteredEnvironment,
    SubmissionRefused,
)
from grpo_api.redis_link import RedisLink
from grpo_core.wire import EnvironmentRegistration, Registration, ServerStatus

_NO_ENVIRONMENT = "-"
# Longer than any request keeps trying to reach Redis.
_RECEIPT_S = 600

_STATE_KEYS = (
    *("trainer", "environments", "environment_names", "name_counts", "connected", "queue"),
    *("payloads", "sequences_by_env", "sequences_by_size", "lease", "latest", "last_group_id"),
)


class RunStore:
    """Every method raises `StoreUnavailable` where Redis does not answer within the deadline."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def close(self) -> None:
        await self._link.close()

    async def ping(self) -> None:
        await self._link.ping()

    async def reset(self) -> None:
        await self._link.call("UNLINK", *self._keys(*_STATE_KEYS))

    async def register(self, registration: Registration) -> tuple[int, int]:
        """Returns the trainer's new id (128 bits) and the run's step.

        Raises:
            Refused: 409, what the run holds cannot be served in batches of the new size.
        """
        trainer_id = uuid.uuid4()
        outcome, *rest = await self._link.script(
            "register",
            self._keys("trainer", "environments", "connected", "lease", "sequences_by_size"),
            registration.model_dump_json(),
            registration.batch_size,
            registration.starting_step,
            trainer_id.hex,
        )
        if outcome == b"conflict":
            current, *reasons = rest
            raise Refused(
                409,
                f"batch_size {registration.batch_size} differs from this run's {current}, and "
                f"{'; '.join(reason.decode() for reason in reasons)}; register with batch_size "
                f"{current}, use another run id, or clear the run with GET /reset_data",
            )
        return trainer_id.int, int(rest[0])

    async def register_environment(
        self, registration: EnvironmentRegistration
    ) -> RegisteredEnvironment | None:
        """None until a trainer has registered and polled once.

        Raises:
            Refused: 422, no batch can hold groups of this size.
        """
        outcome, *rest = await self._link.script(
            "register_environment",
            self._keys(
                *("trainer", "environments", "environment_names", "name_counts", "connected"),
                _receipt(),
            ),
            registration.model_dump_json(),
            registration.desired_name,
            registration.group_size,
            _RECEIPT_S,
        )
        if outcome == b"wait":
            return None
        if outcome == b"indivisible":
            raise unprocessable(
                ["group_size"], _indivisible(registration.group_size, batch_size=rest[0])
            )
        env_id, name, step, trainer = rest
        return RegisteredEnvironment(
            env_id, name.decode(), step, Registration.model_validate_json(trainer)
        )

    async def disconnect(self, env_id: int) -> bool:
        """False where no such environment has registered."""
        environments, connected = self._keys("environments", "connected")
        known, _ = await self._link.transaction(
            ("HEXISTS", environments, env_id), ("SREM", connected, env_id)
        )
        return bool(known)

    async def submit(self, groups: Sequence[PackedGroup]) -> SubmissionRefused | None:
        """Queue all groups, or none of them.

        Raises:
            Refused: 409, no trainer has registered.
        """
        arguments: list[Any] = [_RECEIPT_S]
        for group in groups:
            env_id = _NO_ENVIRONMENT if group.env_id is None else group.env_id
            arguments += [env_id, group.sequences, group.payload]
        outcome, *rest = await self._link.script(
            "submit",
            self._keys(
                *("trainer", "environments", "queue", "payloads", "sequences_by_env"),
                *("sequences_by_size", "latest", "last_group_id", _receipt()),
            ),
            *arguments,
        )
        if outcome == b"queued":
            return None
        if outcome == b"unregistered":
            raise Refused(409, "no trainer has registered; POST /register comes before any data")
        index, sequences, size = rest
        if outcome == b"indivisible":
            return SubmissionRefused(index, _indivisible(sequences, batch_size=size))
        return SubmissionRefused(
            index,
            f"a group of {sequences} sequences, but its environment registered group_size {size}; "
            "mixed group sizes within one environment are not supported yet",
        )

    async def open_poll(self, poll: str) -> LeasedBatch | OpenPoll:
        """Hand out again the batch that nobody received, or acknowledge the one before.

        Raises:
            TrainerNotRegistered
        """
        outcome, *rest = await self._link.script(
            "open_poll", self._keys("trainer", "lease", "payloads", "latest"), poll
        )
        if outcome == b"unregistered":
            raise TrainerNotRegistered
        if outcome == b"leased":
            return LeasedBatch(step=rest[0], sequences=rest[1], payloads=rest[2:], again=True)
        return OpenPoll(poll=poll, trainer_id=rest[0], batch_size=rest[1])

    async def queue_head(self, limit: int) -> list[QueuedGroup]:
        """The oldest `limit` groups."""
        (queue,) = self._keys("queue")
        entries = await self._link.call("ZRANGE", queue, 0, limit - 1)
        return [_queued_group(entry) for entry in entries]

    async def lease(self, poll: OpenPoll, group_ids: Sequence[int]) -> LeasedBatch | LeaseLost:
        """Take the groups off the queue as one batch and count the step, all or nothing."""
        outcome, *rest = await self._link.script(
            "lease",
            self._keys(
                *("trainer", "lease", "payloads", "queue"),
                *("sequences_by_env", "sequences_by_size"),
            ),
            poll.poll,
            poll.trainer_id,
            poll.batch_size,
            *group_ids,
        )
        if outcome != b"leased":
            return LeaseLost(outcome.decode())
        return LeasedBatch(step=rest[0], sequences=rest[1], payloads=rest[2:], again=False)

    async def registration(self) -> Registration | None:
        (trainer,) = self._keys("trainer")
        found = await self._link.call("HGET", trainer, "registration")
        return Registration.model_validate_json(found) if found else None

    async def status(self) -> ServerStatus:
        trainer, queue = self._keys("trainer", "queue")
        step, queued = await self._link.transaction(("HGET", trainer, "step"), ("ZCARD", queue))
        return ServerStatus(current_step=int(step or 0), queue_size=queued)

    async def latest_payload(self) -> bytes | None:
        """The last group queued, whether or not it has been served since."""
        payload: bytes | None = await self._link.script(
            "latest_payload", self._keys("latest", "payloads")
        )
        return payload

    async def environments(self) -> list[Environment]:
        """In order of registration."""
        return (await self.environments_and_counters())[0]

    async def environments_and_counters(self) -> tuple[list[Environment], RunCounters]:
        """One consistent view, at a cost that does not grow with the queue."""
        trainer, registrations, names, connected, by_env, by_size = self._keys(
            *("trainer", "environments", "environment_names", "connected"),
            *("sequences_by_env", "sequences_by_size"),
        )
        numbers, by_id, name_of, connected_ids, env_sequences, sizes = await self._link.transaction(
            ("HMGET", trainer, "step", "batch_size"),
            ("HGETALL", registrations),
            ("HGETALL", names),
            ("SMEMBERS", connected),
            ("HGETALL", by_env),
            ("HKEYS", by_size),
        )
        environments = [
            Environment(
                env_id=int(env_id),
                name=name_of[env_id].decode(),
                connected=env_id in connected_ids,
                registration=EnvironmentRegistration.model_validate_json(registration),
            )
            for env_id, registration in by_id.items()
        ]
        counters = RunCounters(
            current_step=int(numbers[0] or 0),
            batch_size=int(numbers[1] or 0),
            sequences_by_env={_env_id(key): int(n) for key, n in env_sequences.items()},
            max_group_size=max(map(int, sizes), default=1),
        )
        return sorted(environments, key=lambda environment: environment.env_id), counters

    def _keys(self, *names: str) -> list[str]:
        return [self._link.prefix + name for name in names]


def _receipt() -> str:
    return f"receipt:{uuid.uuid4().hex}"


def _env_id(field: bytes) -> int | None:
    return None if field.decode() == _NO_ENVIRONMENT else int(field)


def _queued_group(entry: bytes) -> QueuedGroup:
    group_id, env_id, sequences, stored_bytes = entry.split()
    return QueuedGroup(int(group_id), _env_id(env_id), int(sequences), int(stored_bytes))


def _indivisible(size: int, batch_size: int) -> str:
    return (
        f"a group of {size} sequences can never be served: batches hold exactly {batch_size}, "
        f"which {size} does not divide"
    )
