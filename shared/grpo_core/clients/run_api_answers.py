"""Parses the answers of run-api into records and errors."""

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
from grpo_core.validation import problems_of
from grpo_core.wire.fields import WireModel
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.run_api import EnvironmentCount
from grpo_core.wire.scored_group import ScoredGroup

SERVICE = "Atropos API"
"""The name in messages, because users search for "Atropos API not reachable"."""

REFUSED_GROUPS_HINT = "correct the environment: run-api refuses its groups"

M = TypeVar("M", bound=WireModel)

_VERSIONS: TypeAdapter[list[PolicyVersion | None]] = TypeAdapter(list[PolicyVersion | None])
_LEASES_FULL, _SUPERSEDED, _UNKNOWN_BATCH = "leases_full", "trainer_superseded", "batch_unknown"
"""Problem types in an answer, because several of them share a status."""


@dataclass(frozen=True)
class LeasedBatch:
    """A batch that is leased to this trainer. Ids of a run count from 1.

    `received_under`: for each group, the policy version that was served when run-api received it.
    These weights or older ones sampled the group. None if the version was unknown.

    Example: `LeasedBatch(5, [a, b], [PolicyVersion(1, 7), None])`.
    """

    id: int
    groups: list[ScoredGroup]
    received_under: list[PolicyVersion | None]


def json_object(response: httpx.Response) -> dict[str, Any]:
    """The answer as a JSON object. Raises `ProtocolViolation` if it is not one."""
    try:
        answer = response.json()
    except ValueError as error:
        raise ProtocolViolation(
            f"{SERVICE}: the response from {response.request.url} is not JSON; check the URL of "
            "run-api"
        ) from error
    if not isinstance(answer, dict):
        raise ProtocolViolation(
            f"{SERVICE}: the response from {response.request.url} is not a JSON object"
        )
    return answer


def parse(model: type[M], answer: dict[str, Any] | None) -> M:
    """Raises `ProtocolViolation` if the answer is not a valid record."""
    try:
        return model.model_validate(answer)
    except ValidationError as error:
        raise ProtocolViolation(
            f"{SERVICE} sent an invalid answer: {problems_of(error)}"
        ) from error


def named_refusal(error: RequestRefused) -> RequestRefused:
    """The refusal as a subclass, if a trainer reacts to it; else unchanged."""
    said = str(error)
    if _LEASES_FULL in error.kinds:
        return LeasesFull(said, error.status, error.kinds)
    if _UNKNOWN_BATCH in error.kinds:
        return UnknownBatch(said, error.status, error.kinds)
    if _SUPERSEDED in error.kinds:
        return TrainerSuperseded(
            f"{said}. The newer trainer gets the batches that the checkpoint of this "
            "trainer does not include",
            error.status,
            error.kinds,
        )
    return error


def named_refusals(environments: EnvironmentCount) -> str:
    """The end of an error that names the lack of a batch; "" if run-api refused no group."""
    if not environments.refused_groups:
        return ""
    return (
        f". Refused groups since this trainer registered: {environments.refused_groups}; the last "
        f"reason: {environments.last_refusal}; {REFUSED_GROUPS_HINT}"
    )


def leased_batch(answer: dict[str, Any], after: int) -> LeasedBatch | EnvironmentCount:
    """Parse the answer of `GET /batch?after=`; the number of environments if there is no batch.

    Raises:
        ProtocolViolation: no trainer is registered, or the batch is invalid or not a later one.
    """
    if answer.get("status") == "error":
        raise ProtocolViolation(
            f"{SERVICE}: {answer.get('message')} The registration of this trainer is lost: "
            "someone called /reset_data, or Redis lost its data and needs --appendonly yes"
        )
    if answer["batch"] is None:
        return parse(EnvironmentCount, answer.get("environments"))
    batch_id = answer.get("batch_id")
    if not isinstance(batch_id, int) or batch_id <= after:
        raise ProtocolViolation(
            f"{SERVICE}: expected a batch id greater than {after}, received {batch_id}; check "
            "that the URL belongs to run-api"
        )
    try:
        groups = [ScoredGroup.model_validate(group) for group in answer["batch"]]
    except ValidationError as error:
        raise ProtocolViolation(
            f"{SERVICE}: batch {batch_id} has an invalid group: {problems_of(error)}"
        ) from error
    return LeasedBatch(batch_id, groups, _received_under(answer, batch_id, len(groups)))


def _received_under(
    answer: dict[str, Any], batch_id: int, groups: int
) -> list[PolicyVersion | None]:
    try:
        versions = _VERSIONS.validate_python(answer.get("received_under"))
    except ValidationError as error:
        raise ProtocolViolation(
            f"{SERVICE}: the field received_under of batch {batch_id} is invalid "
            f"({problems_of(error)}); use the same release of run-api and of the trainer"
        ) from error
    if len(versions) != groups:
        raise ProtocolViolation(
            f"{SERVICE}: batch {batch_id} has {groups} groups, but {len(versions)} policy "
            "versions in the field received_under; use the same release of run-api and trainer"
        )
    return versions
