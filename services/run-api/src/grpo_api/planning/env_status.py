"""What one environment is told about the run's data, computed from counters alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from grpo_api.planning.quotas import Share
from grpo_api.planning.run_view import Environment, Limits, RunCounters, RunView
from grpo_api.planning.subset_sum import Kind
from grpo_core.wire.fields import IGNORED_WEIGHT
from grpo_core.wire.run_api import EnvironmentStatus

MIN_ENV_WEIGHT = 0.01
"""No environment is starved completely."""


def environment_status(own: Environment, run: RunView, limits: Limits) -> EnvironmentStatus:
    """Answer of `/status-env` for `own`, which is one of `run.environments`.

    Sizes are in groups of the asking environment. What other environments hold beyond their
    minimum counts as queued for everybody, rounded up to whole packs of the largest group, except
    where `is_waited_for` says that it must not slow this environment down. The fuller the queue,
    the smaller the weight: Atropos environments send so many fewer requests.
    """
    counters, connected = run.counters, run.connected()
    minimums = {e.env_id: e.registration.min_batch_allocation or 0.0 for e in connected}
    own_sequences = counters.sequences_by_env().get(own.env_id, 0)
    queued_sequences = own_sequences + _beyond_minimums(own.env_id, minimums, counters)
    pressure = counters.fill.pressure(limits)
    if queued_sequences >= counters.batch_size and is_waited_for(own.share, run):
        queued_sequences = own_sequences
    if pressure and may_overfill(own.share, run):
        pressure = 0.0
    group_size = own.registration.group_size
    return EnvironmentStatus(
        current_step=counters.current_step,
        queue_size=queued_sequences // group_size,
        unallocated_fraction=1.0 - min(1.0, math.fsum(minimums.values())),
        self_queue_size=own_sequences // group_size,
        max_group_size=counters.max_group_size,
        env_weight=max(MIN_ENV_WEIGHT, _weight(own, connected) * (1.0 - pressure)),
        pressure=pressure,
        num_steps=counters.num_steps,
    )


def is_waited_for(sender: Share | None, run: RunView) -> bool:
    """Whether the next batch may be waiting for data of this sender (None: nobody who registered).

    An environment pauses once `queue_size` shows a batch or more, and submissions wait for a full
    queue. Where nothing exact can be formed from what is queued, and everybody pauses or waits, the
    run would stand still for ever. So those whose minimum is missing go on; and where minimums are
    not what is missing, everybody does. Own data still paces: with a batch's worth from everybody
    there is one.
    """
    queued, needed = run.counters.queued, run.demand()
    if needed.is_met_by(queued):
        return False
    unmet = needed.unmet(queued)
    with_minimums = {kind: needed.batch_size // kind.sequences for kind in unmet}
    if unmet and needed.is_met_by({**queued, **with_minimums}):
        return sender is not None and sender.kind in unmet
    return True


def may_overfill(sender: Share | int, run: RunView) -> bool:
    """Whether data of this sender is taken, and it is not slowed, although the queue is full.

    Never more than one batch could hold of it: no plan looks at more.

    Args:
        sender: an environment's share, or the size of groups that nobody who registered sends.
    """
    kind = Kind(None, sender) if isinstance(sender, int) else sender.kind
    queued, batch_size = run.counters.queued.get(kind, 0), run.counters.batch_size
    share = None if isinstance(sender, int) else sender
    return queued < batch_size // kind.sequences and is_waited_for(share, run)


def _beyond_minimums(own_id: int, minimums: Mapping[int, float], counters: RunCounters) -> int:
    """Sequences of the others that are not reserved by their minimum allocations."""
    pack = counters.max_group_size
    if pack <= 1:
        return 0
    total = 0
    for env_id, sequences in counters.sequences_by_env().items():
        if env_id == own_id:
            continue
        minimum = 0.0 if env_id is None else minimums.get(env_id, 0.0)
        packed = math.ceil(sequences / pack) * pack
        total += max(0, packed - int(counters.batch_size * minimum))
    return total


def _weight(own: Environment, connected: Sequence[Environment]) -> float:
    """Share of the token budget; the least one where nobody connected has any weight, all of it
    where its own is to be ignored."""
    if own.registration.weight == IGNORED_WEIGHT:
        return 1.0
    total = math.fsum(_tokens_times_weight(environment) for environment in connected)
    return max(MIN_ENV_WEIGHT, _tokens_times_weight(own) / total) if total else MIN_ENV_WEIGHT


def _tokens_times_weight(environment: Environment) -> float:
    registration = environment.registration
    weight = 0.0 if registration.weight == IGNORED_WEIGHT else registration.weight
    return registration.max_token_length * weight
