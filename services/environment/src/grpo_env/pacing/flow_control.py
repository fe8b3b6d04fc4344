"""How many groups may be started now: enough to keep the trainer fed, no more, so data is fresh.

Pure. Sequences queued or being sampled stay within `max_batches_offpolicy` batches: what is
sampled beyond that would be trained on by a policy that has moved on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_core.wire.run_api import EnvironmentStatus, TrainerInfo

END_MARGIN_BATCHES = 1
"""Sampled beyond the last batch. Groups may still be dropped, and run-api rounds the share of
other environments up: a tight count could leave the last batch one group short for ever."""


@dataclass(frozen=True)
class Pace:
    """The limits; `total_steps` is the only one that may change during a run."""

    group_size: int
    max_batches_offpolicy: int
    max_concurrent_groups: int
    total_steps: int
    min_batch_allocation: float = 0.0
    """Share of every batch that must come from this environment."""


@dataclass(frozen=True)
class Load:
    """Groups of this environment that `EnvironmentStatus` does not count yet."""

    in_flight: int
    sent_since_status: int = 0


def run_is_complete(status: EnvironmentStatus, pace: Pace) -> bool:
    """The last batch has been *delivered*: `current_step` counts deliveries. A queue that merely
    holds enough for it does not complete the run, since a group in it may still be refused or lost
    and the trainer would wait for ever."""
    return status.current_step >= pace.total_steps


def groups_to_start(status: EnvironmentStatus, trainer: TrainerInfo, pace: Pace, load: Load) -> int:
    """How many groups to start now, by the latest poll of a run that is not complete."""
    if trainer.batch_size < 1:
        return 0  # no trainer is registered: after a reset
    if status.pressure >= 1.0:
        return 0  # the queue is full: run-api would only hold what is sent
    batches_left = pace.total_steps - status.current_step
    wanted = min(
        _fresh_groups(trainer.batch_size, pace),
        _groups_in(batches_left + END_MARGIN_BATCHES, trainer.batch_size, pace),
    )
    # Others may fill the queue, but no batch is made without this environment's own share.
    wanted_of_own = math.ceil(wanted * pace.min_batch_allocation)
    missing = max(wanted - status.queue_size, wanted_of_own - status.self_queue_size)
    missing -= load.sent_since_status + load.in_flight
    free_slots = _slots(status, pace) - load.in_flight
    return max(0, min(missing, free_slots))


def _fresh_groups(batch_size: int, pace: Pace) -> int:
    """At least one whole batch: a bound that rounds down to less would starve the trainer."""
    bound = pace.max_batches_offpolicy * batch_size // pace.group_size
    return max(bound, _groups_in(1, batch_size, pace))


def _groups_in(batches: int, batch_size: int, pace: Pace) -> int:
    return -(-batches * batch_size // pace.group_size)


def _slots(status: EnvironmentStatus, pace: Pace) -> int:
    """Environments share the slots by weight, which run-api lowers as its queue fills up. Each
    keeps one, or it would never be heard."""
    return max(1, int(pace.max_concurrent_groups * status.env_weight))
