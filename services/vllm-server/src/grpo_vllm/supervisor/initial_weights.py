"""What the first engine of a supervisor is to serve: what this run was served last."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from grpo_core.weights.files import (
    UnusableWeights,
    WeightKind,
    check_weights,
    directory_digest,
)
from grpo_core.wire import PolicyVersion
from grpo_vllm.forkserver.engine_plan import PlannedWeights
from grpo_vllm.settings import ServerSettings
from grpo_vllm.weights.served_store import ServedStore, ServedWeights

log = structlog.get_logger()


async def first_weights(settings: ServerSettings, store: ServedStore) -> PlannedWeights:
    """Where weights are shared the engine process finds out itself: a trainer must write them.

    Raises:
        UnusableWeights: what the run was served is gone from the disk, or damaged.
        RedisUnreachable, BadServedRecord: it is not known.
    """
    if settings.share_weights:
        return PlannedWeights()
    served = await store.read(settings.redis_deadline_s)
    if served is None:
        return PlannedWeights()
    if not served.trained:
        return PlannedWeights(version=served.version)
    obstacle = _obstacle(settings, served)
    if obstacle is None:
        return await _from_disk(settings, served)
    log.warning(
        "this run was served other weights, which this server cannot load; it begins with its own "
        "model, under a version of a new epoch",
        served=tuple(served.version),
        reason=obstacle,
    )
    begun = PlannedWeights(version=PolicyVersion(served.version.epoch + 1, 0))
    await store.save(recorded(begun, settings.model))
    return begun


def recorded(weights: PlannedWeights, model: str) -> ServedWeights:
    """As it stands in Redis."""
    return ServedWeights(
        version=weights.version,
        intact=True,
        trained=weights.trained,
        kind=weights.kind.value if weights.kind else "",
        path=str(weights.directory) if weights.directory else "",
        sha256=weights.sha256,
        model=model,
    )


def found_serving(
    version: PolicyVersion, adapter: dict[str, str] | None, in_memory: bool
) -> PlannedWeights:
    """What an engine serves without having been told by us: a trainer has written in place, or
    somebody has loaded or unloaded an adapter by hand.

    Raises `OSError` where the adapter is not on disk any more.
    """
    if in_memory:
        return PlannedWeights(version=version, trained=True, in_memory=True)
    if adapter is None:
        return PlannedWeights(version=version)
    directory = Path(adapter["adapter_path"])
    return PlannedWeights(
        version=version,
        kind=WeightKind.ADAPTER,
        directory=directory,
        sha256=directory_digest(directory),
        trained=True,
    )


def _obstacle(settings: ServerSettings, served: ServedWeights) -> str | None:
    """Why what was served is none of this server's mode; None where it is."""
    wanted = WeightKind.ADAPTER if settings.enable_lora else WeightKind.CHECKPOINT
    if not settings.await_weights:
        return "--no-await-weights"
    if not served.kind:
        return "a trainer wrote them in place, in mode shared_vllm"
    if served.kind != wanted.value:
        return f"they are {_article(served.kind)}, and this server serves {_article(wanted.value)}"
    if served.model != settings.model:
        return f"they are of {served.model}"
    return None


async def _from_disk(settings: ServerSettings, served: ServedWeights) -> PlannedWeights:
    kind = WeightKind(served.kind)
    below = settings.weights_dir or Path(served.path).parent
    try:
        directory = await asyncio.to_thread(check_weights, kind, served.path, served.sha256, below)
    except UnusableWeights as error:
        raise UnusableWeights(
            f"this run was served policy version {tuple(served.version)} last, and that cannot be "
            f"served again: {error}. Start with another --run-id, or with --no-await-weights to "
            f"serve {settings.model} as it is on disk"
        ) from error
    return PlannedWeights(
        version=served.version, kind=kind, directory=directory, sha256=served.sha256, trained=True
    )


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
