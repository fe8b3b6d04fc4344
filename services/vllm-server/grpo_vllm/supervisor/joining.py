"""Chooses the weights of a server's first engine, and which versions this server can serve."""

from __future__ import annotations

import asyncio

import structlog

from grpo_core.errors import GrpoError
from grpo_core.tree.server import ServerSettings
from grpo_core.weights.directory_checks import (
    UnusableWeights,
    check_weights,
    require_complete,
    require_servable_adapter,
)
from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_core.weights.version_log import ServerVersionLog
from grpo_core.weights.versions import VersionKind, same_model
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.supervisor.follower import Check, Follower
from grpo_vllm.weights.fetch import Staged
from grpo_vllm.weights.served_store import ServedStore, ServedWeights
from grpo_vllm.weights.staging import NotFetched

log = structlog.get_logger()


class WrongModel(UnusableWeights):
    """The run trains another model than this server's --model."""


class WrongKind(UnusableWeights):
    """The run trains adapters, and this server loads whole models; or the other way round."""


class UnlikeOthers(GrpoError):
    """Other servers serve this run, and this one would sample from something else."""


def servable(settings: ServerSettings) -> Check:
    """Whether this server can serve a version; see `Check`."""

    async def check(staged: Staged) -> None:
        kind, model = staged.announced.kind.weights, staged.announced.model
        if not same_model(model, settings.model):
            raise WrongModel(
                f"policy version {staged.announced.id} belongs to {model}, but this server serves "
                f"{settings.model}; start it with the trainer's --model, or another --run-id"
            )
        if kind is not WeightKind.BASE and (kind is WeightKind.ADAPTER) != settings.enable_lora:
            what = "a whole model" if settings.enable_lora else "an adapter"
            flag = "without --enable-lora" if settings.enable_lora else "with --enable-lora"
            raise WrongKind(
                f"policy version {staged.announced.id} is {what}; start the server {flag}"
            )
        if staged.directory is not None:
            require_complete(kind, staged.directory)
            if kind is WeightKind.ADAPTER:
                require_servable_adapter(staged.directory, settings.max_lora_rank)

    return check


async def require_like_others(
    settings: ServerSettings, versions: ServerVersionLog, dtype: str
) -> None:
    """Raises `UnlikeOthers` if a server of the run has another data type: the trainer has only one.
    Args: dtype: of this server; "" if unknown"""
    for other in await versions.others():
        if other.serves and "" not in (dtype, other.dtype) and other.dtype != dtype:
            raise UnlikeOthers(
                f"this server's weights are in {dtype}, but {other.name} of run "
                f"{settings.run_id!r} serves them in {other.dtype}; start this server with --dtype "
                f"{other.dtype}, or with another --run-id"
            )


async def joined(
    settings: ServerSettings,
    store: ServedStore,
    versions: ServerVersionLog,
    follower: Follower,
) -> WeightRef:
    """The newest announced version. If none was announced, the weights that the run served last, or
    the model itself.

    A run that nobody named may be an earlier one, so its weights are not waited for: the server
    then serves --model under a new policy version. With other servers in the run it must not, since
    requests go to the newest policy version.

    Raises:
        UnusableWeights: the server cannot serve the run's weights.
        UnlikeOthers: it cannot serve them, and others do.
        RedisUnreachable, BadServedRecord: Redis cannot be read.
    """
    await store.read(settings.redis_deadline_s)  # raises without a Redis that was named
    if store.unread:
        return WeightRef()
    head = await versions.head()
    if head is None:
        return await first_weights(settings, store)
    try:
        if settings.await_weights or head.kind is VersionKind.BASE:
            found = await follower.join(waits="run_id" in settings.model_fields_set)
            return found or await first_weights(settings, store)
        obstacle = "--no-await-weights"
    except (NotFetched, WrongKind, WrongModel) as error:
        others = [o.name for o in await versions.others() if o.serves and o.epoch == head.epoch]
        if others:
            raise UnlikeOthers(
                f"{error}; run {settings.run_id!r} has {', '.join(others)}"
            ) from None
        obstacle = str(error)
    follower.begin_after(head.version)
    served = await store.read(settings.redis_deadline_s)
    newest = max(head.version, served.weights.version if served else head.version)
    return await _begin_anew(settings, store, head.version, newest, obstacle)


async def first_weights(settings: ServerSettings, store: ServedStore) -> WeightRef:
    """The weights that this run served last, or the model itself.

    Raises:
        UnusableWeights: the last served weights of a run that --run-id names are missing from the
            disk or damaged.
        RedisUnreachable, BadServedRecord: the record of the served weights cannot be read.
    """
    served = await store.read(settings.redis_deadline_s)
    if served is None or not served.weights.trained:
        return served.weights if served is not None else WeightRef()
    version, obstacle = served.weights.version, _obstacle(settings, served)
    if obstacle is None:
        try:
            path = await asyncio.to_thread(check_weights, served.weights, settings.loads_from)
        except UnusableWeights as error:
            obstacle = (
                f"this run last served policy version {tuple(version)}, which cannot be loaded: "
                f"{error}. Start with another --run-id, or with --no-await-weights to serve "
                f"{settings.model} from disk"
            )
            if "run_id" in settings.model_fields_set:
                raise UnusableWeights(obstacle) from error
            # Nobody named this run, so it may be an earlier one.
        else:
            log.info(
                "weights.restored",
                policy_version=tuple(version),
                directory=str(path),
                hint=f"to serve {settings.model}, pass --no-await-weights or another --run-id",
            )
            return served.weights.model_copy(update={"path": path})
    return await _begin_anew(settings, store, version, version, obstacle)


async def _begin_anew(
    settings: ServerSettings,
    store: ServedStore,
    left_out: PolicyVersion,
    newest: PolicyVersion,
    reason: str,
) -> WeightRef:
    """The model itself, under a version that no trainer has used."""
    log.warning(
        "weights.not_restored",
        policy_version=tuple(left_out),
        reason=reason,
        effect=f"the server serves {settings.model} under a new policy version",
    )
    begun = WeightRef(version=newest.next_epoch())
    await store.save(ServedWeights(begun, model=settings.model))
    return begun


def _obstacle(settings: ServerSettings, served: ServedWeights) -> str | None:
    """The reason why this server cannot serve the last served weights; None if it can."""
    kind = served.weights.kind
    wanted = WeightKind.ADAPTER if settings.enable_lora else WeightKind.CHECKPOINT
    if not settings.await_weights:
        return "--no-await-weights"
    if kind is WeightKind.MEMORY:
        return "a trainer wrote the weights in place (shared_vllm), so the weights are not on disk"
    if kind is not wanted:
        named = {WeightKind.ADAPTER: "an adapter", WeightKind.CHECKPOINT: "a checkpoint"}
        return f"the weights are {named[kind]}, but this server serves {named[wanted]}"
    if not served.weights.digest:
        return "the trainer's announcement of the weights is lost"
    if not same_model(served.model, settings.model):
        return f"the weights belong to {served.model}, but this server serves {settings.model}"
    return None
