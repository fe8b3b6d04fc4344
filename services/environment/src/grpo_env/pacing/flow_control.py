"""How many groups may be started now: enough to keep the trainer fed, no more, so data is fresh.

Pure. Sequences queued or being sampled stay within `max_batches_offpolicy` batches: what is
sampled beyond that would be trained on by a policy that has moved on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_core.wire.run_api import EnvironmentStatus, TrainerInfo
from grpo_env.config.settings import EnvServerSettings

END_MARGIN_BATCHES = 1
"""Sampled beyond the last batch. Groups may still be dropped, and run-api rounds the share of
other environments up: a tight count could leave the last batch one group short for ever."""


@dataclass(frozen=True)
class Load:
    """Groups of this environment that `EnvironmentStatus` does not count yet."""

    in_flight: int
    sent_since_status: int = 0


def run_is_complete(status: EnvironmentStatus, total_steps: int) -> bool:
    """The last batch has been *delivered*: `current_step` counts deliveries. A queue that merely
    holds enough for it does not complete the run, since a group in it may still be refused or lost
    and the trainer would wait for ever."""
    return status.current_step >= total_steps


def groups_to_start(
    status: EnvironmentStatus,
    trainer: TrainerInfo,
    settings: EnvServerSettings,
    total_steps: int,
    load: Load,
) -> int:
    """How many groups to start now, by the latest poll of a run that is not complete.

    Args:
        total_steps: of the run, whatever the settings say
    """
    if trainer.batch_size < 1:
        return 0  # no trainer is registered: after a reset
    if status.pressure >= 1.0:
        return 0  # the queue is full: run-api would only hold what is sent
    batches_left = total_steps - status.current_step
    wanted = min(
        _fresh_groups(trainer.batch_size, settings),
        _groups_in(batches_left + END_MARGIN_BATCHES, trainer.batch_size, settings),
    )
    # Others may fill the queue, but no batch is made without this environment's own share.
    wanted_of_own = math.ceil(wanted * (settings.min_batch_allocation or 0.0))
    missing = max(wanted - status.queue_size, wanted_of_own - status.self_queue_size)
    missing -= load.sent_since_status + load.in_flight
    free_slots = _slots(status, settings) - load.in_flight
    return max(0, min(missing, free_slots))


def _fresh_groups(batch_size: int, settings: EnvServerSettings) -> int:
    """At least one whole batch: a bound that rounds down to less would starve the trainer."""
    bound = settings.max_batches_offpolicy * batch_size // settings.group_size
    return max(bound, _groups_in(1, batch_size, settings))


def _groups_in(batches: int, batch_size: int, settings: EnvServerSettings) -> int:
    return -(-batches * batch_size // settings.group_size)


def _slots(status: EnvironmentStatus, settings: EnvServerSettings) -> int:
    """Environments share the slots by weight, which run-api lowers as its queue fills up. Each
    keeps one, or it would never be heard."""
    return max(1, int(settings.max_concurrent_groups * status.env_weight))
