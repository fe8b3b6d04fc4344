"""What run-api answers, read as records and as named errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from grpo_core.errors import (
    LeasesFull,
    ProtocolViolation,
    RequestRefused,
    TrainerSuperseded,
    UnknownBatch,
)
from grpo_core.wire.fields import WireModel
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.run_api import EnvironmentCount
from grpo_core.wire.scored_group import ScoredGroup

SERVICE = "Atropos API"
"""Name in messages: users search for "Atropos API not reachable"."""

M = TypeVar("M", bound=WireModel)

_VERSIONS: TypeAdapter[list[PolicyVersion | None]] = TypeAdapter(list[PolicyVersion | None])
_LEASES_FULL, _SUPERSEDED, _UNKNOWN_BATCH = "leases_full", "trainer_superseded", "batch_unknown"
"""Types of the problems in an answer: the status alone does not tell them apart."""


@dataclass(frozen=True)
class LeasedBatch:
    """A batch that stays this trainer's until it is acknowledged. Ids of a run count from 1.

    `received_under`: for each group the version that was served when run-api received it. No newer
    weights sampled it, older ones may have. None where no server had said what it serves.
    """

    id: int
    groups: list[ScoredGroup]
    received_under: list[PolicyVersion | None]


def json_object(response: httpx.Response) -> dict[str, Any]:
    """Raises `ProtocolViolation` for anything else."""
    try:
        answer = response.json()
    except ValueError as error:
        raise ProtocolViolation(
            f"{SERVICE}: {response.request.url} answered no JSON; is the URL that of run-api?"
        ) from error
    if not isinstance(answer, dict):
        raise ProtocolViolation(f"{SERVICE}: {response.request.url} answered no JSON object")
    return answer


def parse(model: type[M], answer: dict[str, Any] | None) -> M:
    """Raises `ProtocolViolation` where the answer is not such a record."""
    try:
        return model.model_validate(answer)
    except ValidationError as error:
        raise ProtocolViolation(f"{SERVICE}: an answer breaks the contract: {error}") from error


def named_refusal(error: RequestRefused) -> RequestRefused:
    """The same refusal under its own name, where a trainer has something to do about it."""
    said = str(error)
    if _LEASES_FULL in error.kinds:
        return LeasesFull(said, error.status, error.kinds)
    if _UNKNOWN_BATCH in error.kinds:
        return UnknownBatch(said, error.status, error.kinds)
    if _SUPERSEDED in error.kinds:
        return TrainerSuperseded(
            f"{said}. What this trainer has not saved is trained on again by the other one. End "
            "one of the two, or give each a run of its own (--run-id of run-api)",
            error.status,
            error.kinds,
        )
    return error


def leased_batch(answer: dict[str, Any], after: int) -> LeasedBatch | EnvironmentCount:
    """What `GET /batch?after=` answered; where no batch is complete, who could send one.

    Raises:
        ProtocolViolation: nobody is registered, or the batch is broken or not a later one.
    """
    if answer.get("status") == "error":
        raise ProtocolViolation(
            f"{SERVICE}: {answer.get('message')} It knew this trainer before: somebody called "
            "/reset_data, or its Redis lost its data (does it run with --appendonly yes?)"
        )
    if answer["batch"] is None:
        return parse(EnvironmentCount, answer.get("environments"))
    batch_id = answer.get("batch_id")
    if not isinstance(batch_id, int) or batch_id <= after:
        raise ProtocolViolation(
            f"{SERVICE}: asked for the batch after {after}, it answered batch {batch_id}; is "
            "another server than run-api behind this URL?"
        )
    try:
        groups = [ScoredGroup.model_validate(group) for group in answer["batch"]]
    except ValidationError as error:
        raise ProtocolViolation(f"{SERVICE}: broken group in batch {batch_id}: {error}") from error
    return LeasedBatch(batch_id, groups, _received_under(answer, batch_id, len(groups)))


def _received_under(
    answer: dict[str, Any], batch_id: int, groups: int
) -> list[PolicyVersion | None]:
    try:
        versions = _VERSIONS.validate_python(answer.get("received_under"))
    except ValidationError as error:
        raise ProtocolViolation(
            f"{SERVICE}: batch {batch_id} does not say which versions its groups were received "
            f"under; is run-api of the trainer's version? {error}"
        ) from error
    if len(versions) != groups:
        raise ProtocolViolation(
            f"{SERVICE}: batch {batch_id} has {groups} groups, received under {len(versions)} "
            "versions"
        )
    return versions
