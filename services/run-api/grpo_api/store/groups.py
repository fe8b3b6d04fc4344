"""Stores submitted groups in the queue and in environments' buffers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from grpo_api.errors import Refused
from grpo_api.planning.placement import IntakeState, Placement
from grpo_api.planning.run import Limits
from grpo_api.store.keys import (
    RECEIPT_S,
    env_field,
    parse_groups,
    receipt_key,
    write_bundle,
    write_groups,
    write_version,
)
from grpo_api.store.redis import RedisLink
from grpo_api.store.results import NotPlaced, OpenIntake, Outcomes, Submission
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.run_api import EnvironmentRegistration


class GroupStore:
    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def served(self) -> PolicyVersion | None:
        """The policy version that the server reports as served; None if it reports none."""
        return _version(await self._link.call(*self._reading_served()))

    async def open_intake(self, submission: Submission) -> OpenIntake:
        """Reserve an id for each group, and read the state that their placement needs.

        Raises:
            Refused: 409, no trainer has registered, or the groups are of another run.
        """
        env_ids, groups = submission.env_ids(), len(submission.groups)
        trainer, last_id, environments, buffers = self._link.keys(
            "trainer", "last_group_id", "environments", "buffers"
        )
        commands: list[tuple[Any, ...]] = [
            ("HMGET", trainer, "id", "batch_size", "run_uuid"),
            ("INCRBY", last_id, groups),
            self._reading_served(),
        ]
        if env_ids:
            commands += [("HMGET", environments, *env_ids), ("HMGET", buffers, *env_ids)]
        (trainer_id, batch_size, run_uuid), last, served, *by_env = await self._link.transaction(
            *commands
        )
        if batch_size is None:
            raise _no_trainer()
        if submission.run_uuid not in ("", run_uuid.decode()):
            raise _other_run()
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
        return OpenIntake(trainer_id, last - groups + 1, _version(served), state)

    def _reading_served(self) -> tuple[Any, ...]:
        return ("HMGET", self._link.served_weights, "epoch", "step")

    async def queue_whole(self, submission: Submission, limits: Limits) -> Outcomes | NotPlaced:
        """Queue groups that need no planning, all or none. `PLAN` if one of them needs it.

        Raises:
            Refused: 409, no trainer has registered, or the groups are of another run; 422, the key
                was used for other groups.
        """
        outcomes: Outcomes = [None] * len(submission.groups)
        outcome, *rest = await self._link.script(
            "submit_whole",
            (
                *("trainer", "group_sizes", "queue", "payloads", "queued_kinds"),
                *("queued_sizes", "latest", "totals", "last_group_id", "resets", "large"),
                receipt_key(submission.key),
            ),
            RECEIPT_S,
            _written(submission, outcomes),
            limits.queued_groups,
            limits.queued_bytes,
            submission.staged_prefix,
            write_version(submission.received_under),
            submission.run_uuid,
            *(
                field
                for group, content in submission.with_content()
                for field in (
                    env_field(group.env_id),
                    group.sequences,
                    len(group.payload),
                    content,
                )
            ),
            others=[self._link.served_weights],
        )
        if outcome == b"unregistered":
            raise _no_trainer()
        if outcome == b"of another run":
            raise _other_run()
        return _outcome(outcome, rest, submission, outcomes)

    async def commit(
        self,
        intake: OpenIntake,
        placement: Placement,
        submission: Submission,
        limits: Limits,
    ) -> Outcomes | NotPlaced:
        """Carry out the placement, all or nothing. `MOVED` if the state of the run has changed.

        Raises:
            Refused: 422, the key was used for other groups.
        """
        before = intake.state.buffers
        plan = {
            "buffers": [
                [str(env_id), write_groups(before.get(env_id, ())), write_groups(after)]
                for env_id, after in placement.buffers.items()
            ],
            "bundles": [write_bundle(bundle) for bundle in placement.bundles],
        }
        outcomes = placement.buffered_sequences
        outcome, *rest = await self._link.script(
            "submit_placed",
            (
                *("trainer", "buffers", "queue", "payloads", "queued_kinds", "queued_sizes"),
                *("latest", "totals", "resets", "large", receipt_key(submission.key)),
            ),
            RECEIPT_S,
            _written(submission, outcomes),
            intake.trainer_id,
            json.dumps(plan),
            limits.queued_groups,
            limits.queued_bytes,
            intake.first_id,
            submission.staged_prefix,
            *(
                field
                for group, content in submission.with_content()
                for field in (len(group.payload), content)
            ),
        )
        return _outcome(outcome, rest, submission, outcomes)


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
        409,
        "these groups were sampled for another run, which ended with /reset_data; register again "
        "(POST /register-env)",
    )


def _written(submission: Submission, outcomes: Outcomes) -> str:
    return f"{submission.fingerprint} {json.dumps(outcomes)}"


def _outcome(
    outcome: bytes, rest: Sequence[bytes], submission: Submission, outcomes: Outcomes
) -> Outcomes | NotPlaced:
    if outcome == b"placed":
        return outcomes
    if outcome != b"repeated":
        return NotPlaced(outcome.decode())
    fingerprint, written = rest[0].decode().split(" ", 1)
    if fingerprint != submission.fingerprint:
        raise Refused(
            422,
            f"Idempotency-Key {submission.key!r} was used for other groups within the last "
            f"{RECEIPT_S} s; use a new idempotency key for every submission that is not a repeat",
        )
    answered: Outcomes = json.loads(written)
    return answered
