"""Runs this process as the single trainer process, as the leader of several, or as a follower."""

from __future__ import annotations

from collections.abc import Callable

from grpo_trainer.config.processes import Processes
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.ranks.follow import follow
from grpo_trainer.ranks.group import LEADER, join, leave, settings_of_rank
from grpo_trainer.ranks.heartbeat import Heartbeat
from grpo_trainer.ranks.lead import ALONE, Alone, Leader


def take_part(
    settings: TrainerSettings,
    processes: Processes,
    lead: Callable[[TrainerSettings, Alone], None],
) -> None:
    """Args:
        lead: the training loop. It runs on rank 0 and passes its second argument to `open_run`

    Raises:
        LostRank: another process ended. An error on one rank ends all ranks, see
            `heartbeat`.
    """
    if processes.count == 1:
        lead(settings, ALONE)
        return
    ranks, settings = join(processes), settings_of_rank(settings, processes)
    with Heartbeat(ranks):
        if ranks.index == LEADER:
            leader = Leader(ranks)
            lead(settings, leader)
            leader.finish()
        else:
            follow(settings, ranks)
    leave()
