"""Decides how many groups to start now: enough for the trainer, but few enough to stay fresh.

Sequences that are queued, or being sampled and likely to be kept, stay within
`max_batches_offpolicy` batches, because more of them would be too stale when the trainer uses them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_core.wire.run_api import EnvironmentStatus, TrainerInfo
from grpo_env.config.settings import EnvServerSettings

END_MARGIN_BATCHES = 1
"""Batches to sample beyond the last one. Groups may still be dropped, and run-api rounds the share
of other environments up, so an exact count could leave the last batch one group short."""

_LEAST_KEPT_SHARE = 0.5
"""Never sample more than twice the missing groups: if nearly all are dropped, the last ones may
still be good."""


@dataclass(frozen=True)
class Load:
    """Groups of this environment that `EnvironmentStatus` does not include yet.

    `kept_share`: the share of groups that are not dropped for equal scores.
    """

    in_flight: int
    sent_since_status: int = 0
    kept_share: float = 1.0


def run_is_complete(status: EnvironmentStatus, total_steps: int) -> bool:
    """True if the last batch has been delivered to the trainer. Enough groups in the queue do not
    complete a run, because the trainer may still refuse or lose some of them."""
    return status.current_step >= total_steps


def groups_to_start(
    status: EnvironmentStatus,
    trainer: TrainerInfo,
    settings: EnvServerSettings,
    total_steps: int,
    load: Load,
) -> int:
    """The number of groups to start now in a run that is not complete.

    Args:
        status: the answer to the latest poll
        total_steps: the steps of the run; `settings.steps` is ignored
    """
    if trainer.batch_size < 1:
        return 0  # run-api was reset, so no trainer is registered
    if status.pressure >= 1.0:
        return 0  # the queue is full, so run-api would delay submissions
    batches_left = total_steps - status.current_step
    wanted = min(
        _fresh_groups(trainer.batch_size, settings),
        _groups_in(batches_left + END_MARGIN_BATCHES, trainer.batch_size, settings),
    )
    # Other environments may fill the queue, but every batch needs this environment's minimum share.
    wanted_of_own = math.ceil(wanted * (settings.min_batch_allocation or 0.0))
    missing = max(wanted - status.queue_size, wanted_of_own - status.self_queue_size)
    missing -= load.sent_since_status
    # Start the replacements of dropped groups together with the others, or the trainer would wait
    # for one more round of sampling.
    kept_share = max(load.kept_share, _LEAST_KEPT_SHARE)
    to_sample = round(missing / kept_share) if load.in_flight else math.ceil(missing / kept_share)
    free_slots = _slots(status, settings) - load.in_flight
    return max(0, min(to_sample - load.in_flight, free_slots))


def _fresh_groups(batch_size: int, settings: EnvServerSettings) -> int:
    """Groups that stay fresh enough; at least one whole batch, or the trainer would starve."""
    bound = settings.max_batches_offpolicy * batch_size // settings.group_size
    return max(bound, _groups_in(1, batch_size, settings))


def _groups_in(batches: int, batch_size: int, settings: EnvServerSettings) -> int:
    return -(-batches * batch_size // settings.group_size)


def _slots(status: EnvironmentStatus, settings: EnvServerSettings) -> int:
    """Concurrent groups by this environment's weight, which run-api lowers as its queue fills. At
    least one, so that every environment makes progress."""
    return max(1, int(settings.max_concurrent_groups * status.env_weight))
