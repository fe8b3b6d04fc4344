"""What the first engine of a supervisor is to serve: what this run was served last."""

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
    """Where weights are shared the engine process finds out itself: a trainer must write them.

    Raises:
        UnusableWeights: what the run was served is gone from the disk, or damaged.
        RedisUnreachable, BadServedRecord: it is not known.
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
        return await _from_disk(settings, served.weights)
    log.warning(
        "this run was served other weights, which this server cannot load; it begins with its own "
        "model, under a version of a new epoch",
        served=tuple(served.weights.version),
        reason=obstacle,
    )
    begun = WeightRef(version=served.weights.version.next_epoch())
    await store.save(ServedWeights(begun, model=settings.model))
    return begun


def found_serving(
    version: PolicyVersion, adapter: dict[str, str] | None, in_memory: bool
) -> WeightRef:
    """What an engine serves without having been told by us: a trainer has written in place, or
    somebody has loaded or unloaded an adapter by hand.

    Raises `OSError` where the adapter is not on disk any more.
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
    """Why what was served is none of this server's mode; None where it is."""
    kind, wanted = served.weights.kind, WeightKind.CHECKPOINT
    if settings.enable_lora:
        wanted = WeightKind.ADAPTER
    if not settings.await_weights:
        return "--no-await-weights"
    if kind is WeightKind.MEMORY:
        return "a trainer wrote them in place, in mode shared_vllm"
    if kind is not wanted:
        return f"they are {_article(kind)}, and this server serves {_article(wanted)}"
    if served.model != settings.model:
        return f"they are of {served.model}"
    return None


async def _from_disk(settings: ServerSettings, served: WeightRef) -> WeightRef:
    assert served.path is not None, "_obstacle sees to it"
    below = settings.weights_dir or served.path.parent
    try:
        directory = await asyncio.to_thread(check_weights, served, below)
    except UnusableWeights as error:
        raise UnusableWeights(
            f"this run was served policy version {tuple(served.version)} last, and that cannot be "
            f"served again: {error}. Start with another --run-id, or with --no-await-weights to "
            f"serve {settings.model} as it is on disk"
        ) from error
    return served.model_copy(update={"path": directory})


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
