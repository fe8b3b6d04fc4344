"""Notices within a second that another trainer process ended or failed, and within a minute that
one stopped.

A lost process does not make an exchange over NCCL raise: the exchange returns before it is done,
and the GPU waits, with the main thread, until the deadline of the group. So a thread of each rank
also adds up a few numbers over gloo, whose connections close when a process ends.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType

import structlog
import torch
import torch.distributed as dist

from grpo_trainer.config.processes import Processes
from grpo_trainer.errors import LostRank
from grpo_trainer.ranks.group import ALONE, GLOO, Ranks, join

BEAT_S = 1.0
"""Time between two exchanges."""
SILENT_S = 60.0
"""A process that does not take part for this time is lost: stopped, or its host is."""
GRACE_S = 60.0
"""Time that the main thread has to end by itself, by the error of an exchange over gloo."""
EXIT_FAILED = 1

log = structlog.get_logger()


class Heartbeat:
    """Beats within a `with` block, which all ranks enter and leave. A rank that leaves it with an
    error is named by the others. If one is lost, this process ends.

    Args:
        beat_s, silent_s, grace_s: as the constants
    """

    def __init__(
        self,
        ranks: Ranks,
        beat_s: float = BEAT_S,
        silent_s: float = SILENT_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self._ranks = ranks
        self._beat_s, self._silent_s, self._grace_s = beat_s, silent_s, grace_s
        self._group = dist.new_group(backend=GLOO, timeout=timedelta(seconds=silent_s))
        self._is_over = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._has_failed = error is not None
        self._is_over.set()
        # A lost rank keeps the thread; this one ends with its own error.
        self._thread.join(2 * self._beat_s if self._has_failed else None)

    def _run(self) -> None:
        lost = self._first_lost()
        if lost is None:
            return
        log.error("rank.lost", rank=self._ranks.index, reason=lost)
        time.sleep(self._grace_s)
        message = (
            f"rank {self._ranks.index} of {self._ranks.count}: {lost}. Its log has the cause; then "
            "start all processes again"
        )
        log.error(LostRank.__name__, reason=message)
        os._exit(EXIT_FAILED)  # the main thread waits for the lost process, in an exchange

    def _first_lost(self) -> str | None:
        """Exchange beats until all ranks are over (None), or one is lost."""
        while True:
            # The number of ranks that are over, and then whether each rank has failed.
            beats = torch.zeros(1 + self._ranks.count, dtype=torch.int64)
            is_over = self._is_over.is_set()
            has_failed = is_over and self._has_failed
            beats[0], beats[1 + self._ranks.index] = int(is_over), int(has_failed)
            try:
                dist.all_reduce(beats, group=self._group)
            except RuntimeError:
                return (
                    "another trainer process ended, or did not answer for "
                    f"{self._silent_s:g} s; it may be out of memory"
                )
            over, *failed = beats.tolist()
            others = [rank for rank, has in enumerate(failed) if has]
            if has_failed:
                return None
            if others:
                return f"rank {others[0]} ended with an error"
            if over == self._ranks.count:
                return None
            self._is_over.wait(self._beat_s)


@contextlib.contextmanager
def joined(processes: Processes) -> Iterator[Ranks]:
    """This process among the trainer's processes, which begin and end the block together.

    Raises:
        LostRank: another process ended. An error on one rank ends all ranks.
    """
    if processes.count == 1:
        yield ALONE
        return
    ranks = join(processes)
    with Heartbeat(ranks):
        yield ranks
    dist.destroy_process_group()
