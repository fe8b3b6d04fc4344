"""Stores submitted groups in the queue and in environments' buffers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from grpo_api.errors import GroupRefused, Refused, StoreUnavailable
from grpo_api.planning.placement import Groups, Placement, StoredGroup, place
from grpo_api.planning.run_view import QueueLimits
from grpo_api.store.keys import (
    RECEIPT_S,
    env_field,
    parse_groups,
    receipt_key,
    write_entry,
    write_groups,
    write_version,
)
from grpo_api.store.payloads import PackedGroup, PayloadStore
from grpo_api.store.redis import RedisLink
from grpo_api.waiting import in_turn
from grpo_core.wire.policy_version import PolicyVersion

_MAX_PLACEMENTS = 32
_STAGED_FROM_BYTES = 1024 * 1024

log = structlog.get_logger()

Outcomes = list[int | None]
"""For each group of a submission: the sequences in its environment's buffer afterwards, or None if
the group was queued directly."""
Contents = Sequence[bytes | str]
"""For each group of a submission: its payload, or the name of its staged payload."""


@dataclass(frozen=True)
class Submission:
    """Groups that are accepted together or not at all.

    Submission([PackedGroup(3, sequences=8, payload=b"...")], "5f0c1a2e43a00", key="3/17")
    """

    groups: Sequence[PackedGroup]
    fingerprint: str
    """Checksum of the JSON; distinguishes a repeat from other groups with that key."""
    key: str | None = None
    """The sender's idempotency key, or None if it sent none."""
    run_uuid: str = ""
    """The run for which the groups were sampled; "" if the sender does not say."""
    item_positions: str = ""
    """JSON, as `ITEM_POSITIONS_HEADER`; "" if the sender does not say."""
    received_under: PolicyVersion | None = None
    """The version that was served when the groups arrived, if they had to wait; None stands for the
    version that is served now."""

    @property
    def stored_bytes(self) -> int:
        return sum(len(group.payload) for group in self.groups)


class _NotPlaced(Exception):
    """The groups need a placement: some are parts, or the run changed since the last placement."""


class GroupQueue:
    def __init__(self, link: RedisLink, payloads: PayloadStore) -> None:
        self._link = link
        self._payloads = payloads
        self._placing = asyncio.Lock()

    async def served(self) -> PolicyVersion | None:
        """The policy version that the server reports as served; None if it reports none."""
        return _version(await self._link.call(*self._reading_served()))

    async def add(self, submission: Submission, limits: QueueLimits) -> Outcomes | None:
        """Queue whole groups and buffer parts, all or nothing; None if the queue is full.

        Raises:
            GroupRefused: for the first group that cannot be accepted.
            Refused: 409, no trainer has registered, or the groups are of another run; 422, the key
                was used for other groups.
            StoreUnavailable: Redis is unreachable, or the run changes too fast.
        """
        payloads = [group.payload for group in submission.groups]
        if submission.stored_bytes <= _STAGED_FROM_BYTES:
            return await self._add(submission, limits, payloads)
        # A large payload is staged in pieces first, because queueing it in one command would block
        # Redis. It is staged only if there is room.
        (totals,) = self._link.keys("totals")
        held = await self._link.call(
            "HMGET", totals, "queued_groups", "queued_bytes", "buffered_bytes"
        )
        groups, queued_bytes, buffered_bytes = (int(total or 0) for total in held)
        if limits.fill(groups, queued_bytes + buffered_bytes) >= 1.0:
            return await self.earlier(submission)
        async with self._payloads.staged(payloads) as names:
            return await self._add(submission, limits, names)

    async def earlier(self, submission: Submission) -> Outcomes | None:
        """The answer to an earlier submission with the same key; None if there is none.

        Raises:
            Refused: 422, the key was used for other groups.
        """
        if submission.key is None:
            return None
        resets, receipt = self._link.keys("resets", receipt_key(submission.key))
        run, written = await self._link.call("MGET", resets, receipt)
        of_run, _, answer = (written or b"").partition(b" ")
        return _repeated(submission, answer) if of_run == (run or b"0") else None

    async def _add(
        self, submission: Submission, limits: QueueLimits, contents: Contents
    ) -> Outcomes | None:
        try:
            return await self._run(
                "submit_whole",
                submission,
                [None] * len(submission.groups),
                limits,
                contents,
                write_version(submission.received_under),
                submission.run_uuid,
                submission.item_positions,
            )
        except _NotPlaced:
            pass
        # Parts of one environment share its buffer. Of several that are placed at the same time,
        # all but one must start over. So one submission is placed at a time.
        limit_s = self._link.deadline_s
        reason = f"earlier groups took over {limit_s:g} s; send the new groups again"
        async with in_turn(self._placing, limit_s, reason):
            for _ in range(_MAX_PLACEMENTS):
                try:
                    return await self._place(submission, limits, contents)
                except _NotPlaced:
                    pass
        raise StoreUnavailable(
            f"others changed the partial groups {_MAX_PLACEMENTS} times; send the same groups again"
        )

    async def _place(
        self, submission: Submission, limits: QueueLimits, contents: Contents
    ) -> Outcomes | None:
        """Reserve an id for each group, read the state that their placement needs, decide where
        each goes, and carry that out if the run is still the same."""
        env_ids = [group.env_id for group in submission.groups]
        known = sorted({env_id for env_id in env_ids if env_id is not None})
        trainer, last_id, group_sizes, buffers = self._link.keys(
            "trainer", "last_group_id", "group_sizes", "buffers"
        )
        commands: list[tuple[Any, ...]] = [
            ("HMGET", trainer, "id", "batch_size", "run_uuid"),
            ("INCRBY", last_id, len(env_ids)),
            self._reading_served(),
        ]
        if known:
            commands += [("HMGET", group_sizes, *known), ("HMGET", buffers, *known)]
        (trainer_id, batch_size, run_uuid), last, served, *by_env = await self._link.transaction(
            *commands
        )
        if batch_size is None:
            raise _no_trainer()
        if submission.run_uuid not in ("", run_uuid.decode()):
            raise _other_run()
        sizes, buffered = by_env or ([], [])
        size_of = {env_id: int(n) for env_id, n in zip(known, sizes, strict=True) if n}
        parts_of = {
            env_id: parse_groups(parts.decode())
            for env_id, parts in zip(known, buffered, strict=True)
            if parts
        }
        under = submission.received_under or _version(served)
        groups = [
            StoredGroup(id_, group.sequences, len(group.payload), under)
            for id_, group in enumerate(submission.groups, start=last - len(env_ids) + 1)
        ]
        try:
            placement = place(env_ids, groups, int(batch_size), size_of, parts_of)
        except GroupRefused as error:
            log.warning(
                "group.refused", env_id=env_ids[error.index], index=error.index, reason=str(error)
            )
            raise
        return await self._run(
            "submit_placed",
            submission,
            placement.buffered_sequences,
            limits,
            contents,
            trainer_id,
            _plan(placement, parts_of),
            groups[0].id,
            submission.item_positions,
        )

    def _reading_served(self) -> tuple[Any, ...]:
        return ("HMGET", self._link.served_weights, "epoch", "step")

    async def _run(
        self,
        script: str,
        submission: Submission,
        outcomes: Outcomes,
        limits: QueueLimits,
        contents: Contents,
        *arguments: Any,
    ) -> Outcomes | None:
        """Run a script that stores the groups and returns `outcomes`; None if the queue is full.

        Raises:
            _NotPlaced: the script has changed nothing.
        """
        answer = await self._link.script(
            script,
            RECEIPT_S,
            f"{submission.fingerprint} {json.dumps(outcomes)}",
            limits.queued_groups,
            limits.queued_bytes,
            self._payloads.staged_prefix if isinstance(contents[0], str) else "",
            *arguments,
            *(
                field
                for group, content in zip(submission.groups, contents, strict=True)
                for field in (env_field(group.env_id), group.sequences, len(group.payload), content)
            ),
            own_keys=[*self._link.keys(receipt_key(submission.key)), self._link.served_weights],
        )
        match answer:
            case [b"placed", last_id]:
                self._link.confirmed.note(last_id, len(outcomes))
                return outcomes
            case [b"full"]:
                return None
            case [b"plan" | b"moved"]:
                raise _NotPlaced
            case [b"unregistered"]:
                raise _no_trainer()
            case [b"of another run"]:
                raise _other_run()
            case [b"unstaged"]:
                raise StoreUnavailable("storing the groups took too long; send the groups again")
            case [b"repeated", receipt]:
                return _repeated(submission, receipt)
        raise AssertionError(f"{script} answered {answer!r}")


def _repeated(submission: Submission, answer: bytes) -> Outcomes:
    """The outcomes in a receipt. Raises `Refused` if the groups were others."""
    fingerprint, written = answer.decode().split(" ", 1)
    if fingerprint != submission.fingerprint:
        raise Refused(
            422,
            f"Idempotency-Key {submission.key!r} was used for other groups within the last "
            f"{RECEIPT_S} s; use a new one for every submission that is not a repeat",
        )
    answered: Outcomes = json.loads(written)
    return answered


def _plan(placement: Placement, buffers: Mapping[int, Groups]) -> str:
    """The placement as `submit_placed` reads it."""
    return json.dumps(
        {
            "buffers": [
                [str(env_id), write_groups(buffers.get(env_id, ())), write_groups(after)]
                for env_id, after in placement.buffers.items()
            ],
            "entries": [write_entry(kind, groups) for kind, groups in placement.entries],
        }
    )


def _version(served: Sequence[bytes | None]) -> PolicyVersion | None:
    """The version from the two fields in Redis; None if they are missing or not numbers."""
    epoch, step = served
    if epoch is None or step is None or not (epoch.isdigit() and step.isdigit()):
        return None
    return PolicyVersion(int(epoch), int(step))


def _no_trainer() -> Refused:
    return Refused(409, "no trainer has registered; start the trainer (POST /register) first")


def _other_run() -> Refused:
    return Refused(
        409, "these groups are of another run, which /reset_data ended; POST /register-env again"
    )
