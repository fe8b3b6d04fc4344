"""What one environment is told about the run's data, computed from counters alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_core.wire import EnvironmentRegistration, EnvironmentStatus

MIN_ENV_WEIGHT = 0.01
"""No environment is starved completely."""


@dataclass(frozen=True)
class Environment:
    """A registered environment; a disconnected one keeps its id and its data, not its share."""

    env_id: int
    name: str
    connected: bool
    registration: EnvironmentRegistration


@dataclass(frozen=True)
class RunCounters:
    """The queue in numbers. Sequences sent without an env_id count under None."""

    current_step: int
    batch_size: int
    sequences_by_env: Mapping[int | None, int]
    max_group_size: int
    """Sequences in the largest queued group, 1 where the queue is empty."""


def environment_status(
    own: Environment, environments: Sequence[Environment], counters: RunCounters
) -> EnvironmentStatus:
    """Answer of `/status-env` for `own`, which is one of `environments`.

    Sizes are in groups of the asking environment. What other environments hold beyond their
    minimum counts as queued for everybody, rounded up to whole packs of the largest group.
    """
    connected = [environment for environment in environments if environment.connected]
    minimums = {e.env_id: e.registration.min_batch_allocation or 0.0 for e in connected}
    own_sequences = counters.sequences_by_env.get(own.env_id, 0)
    shared_sequences = _beyond_minimums(own.env_id, minimums, counters)
    group_size = own.registration.group_size
    return EnvironmentStatus(
        current_step=counters.current_step,
        queue_size=(own_sequences + shared_sequences) // group_size,
        unallocated_fraction=1.0 - min(1.0, math.fsum(minimums.values())),
        self_queue_size=own_sequences // group_size,
        max_group_size=counters.max_group_size,
        env_weight=_weight(own, connected),
    )


def _beyond_minimums(own_id: int, minimums: Mapping[int, float], counters: RunCounters) -> int:
    """Sequences of the others that are not reserved by their minimum allocations."""
    pack = counters.max_group_size
    if pack <= 1:
        return 0
    total = 0
    for env_id, sequences in counters.sequences_by_env.items():
        if env_id == own_id:
            continue
        minimum = 0.0 if env_id is None else minimums.get(env_id, 0.0)
        packed = math.ceil(sequences / pack) * pack
        total += max(0, packed - int(counters.batch_size * minimum))
    return total


def _weight(own: Environment, connected: Sequence[Environment]) -> float:
    """Share of the token budget; the least one where nobody connected has any weight."""
    total = math.fsum(_tokens_times_weight(environment) for environment in connected)
    return max(MIN_ENV_WEIGHT, _tokens_times_weight(own) / total) if total else MIN_ENV_WEIGHT


def _tokens_times_weight(environment: Environment) -> float:
    return environment.registration.max_token_length * environment.registration.weight
