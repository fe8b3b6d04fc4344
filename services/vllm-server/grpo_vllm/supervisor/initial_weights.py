"""Chooses the weights of the supervisor's first engine: those that this run served last."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from grpo_core.weights.directory_checks import UnusableWeights, check_weights, directory_digest
from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.settings import ServerSettings
from grpo_vllm.weights.served_store import ServedStore, ServedWeights

log = structlog.get_logger()


async def first_weights(settings: ServerSettings, store: ServedStore) -> WeightRef:
    """The weights that this run served last, or the model itself. In `shared_vllm` the engine
    decides, because a trainer must write the weights back.

    Raises:
        UnusableWeights: the last served weights of a run that --run-id names are missing from the
            disk or damaged.
        RedisUnreachable, BadServedRecord: the record of the served weights cannot be read.
    """
    if settings.share_weights:
        return WeightRef()
    served = await store.read(settings.redis_deadline_s)
    if served is None:
        return WeightRef()
    if not served.weights.trained:
        return served.weights
    obstacle = _obstacle(settings, served)
    if obstacle is None:
        try:
            return await _from_disk(settings, served.weights)
        except UnusableWeights as error:
            if "run_id" in settings.model_fields_set:
                raise
            obstacle = str(error)  # nobody named this run, so it may be an earlier one
    log.warning(
        "weights.not_restored",
        policy_version=tuple(served.weights.version),
        reason=obstacle,
        effect=f"the server serves {settings.model} under a new policy version",
    )
    begun = WeightRef(version=served.weights.version.next_epoch())
    await store.save(ServedWeights(begun, model=settings.model))
    return begun


def found_serving(
    version: PolicyVersion, adapter: dict[str, str] | None, in_memory: bool
) -> WeightRef:
    """The weights of an engine whose version changed without the supervisor: a trainer wrote in
    place, or an operator loaded or unloaded an adapter.

    Raises `OSError` if the adapter is no longer on disk.
    """
    if in_memory:
        return WeightRef(version=version, kind=WeightKind.MEMORY)
    if adapter is None:
        return WeightRef(version=version)
    directory = Path(adapter["adapter_path"])
    return WeightRef(
        version=version,
        kind=WeightKind.ADAPTER,
        path=directory,
        digest=directory_digest(directory),
    )


def _obstacle(settings: ServerSettings, served: ServedWeights) -> str | None:
    """The reason why this server cannot serve the last served weights; None if it can."""
    kind, wanted = served.weights.kind, WeightKind.CHECKPOINT
    if settings.enable_lora:
        wanted = WeightKind.ADAPTER
    if not settings.await_weights:
        return "--no-await-weights"
    if kind is WeightKind.MEMORY:
        return "a trainer wrote the weights in place (shared_vllm), so the weights are not on disk"
    if kind is not wanted:
        return f"the weights are {_article(kind)}, but this server serves {_article(wanted)}"
    if served.model != settings.model:
        return f"the weights belong to {served.model}, but this server serves {settings.model}"
    return None


async def _from_disk(settings: ServerSettings, served: WeightRef) -> WeightRef:
    try:
        directory = await asyncio.to_thread(check_weights, served, settings.loads_from)
    except UnusableWeights as error:
        raise UnusableWeights(
            f"this run last served policy version {tuple(served.version)}, which cannot be loaded: "
            f"{error}. Start with another --run-id, or with --no-await-weights to serve "
            f"{settings.model} from disk"
        ) from error
    log.info(
        "weights.restored",
        policy_version=tuple(served.version),
        directory=str(directory),
        hint=f"to serve {settings.model} instead, pass --no-await-weights or another --run-id",
    )
    return served.model_copy(update={"path": directory})


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
