"""The trainer's processes, and what they exchange: tensors alone, never pickles.

Every exchange has a deadline. If a process ends, its connections close, and the exchange of every
other process ends with `LostRank`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_trainer.config.processes import Processes
from grpo_trainer.config.trainer import AUTO_DEVICE, TrainerSettings
from grpo_trainer.errors import LostRank

LEADER = 0
"""The rank that exchanges data with other services, and writes all files."""
GLOO, BOTH = "gloo", "cpu:gloo,cuda:nccl"
_LIBRARIES = ("gloo", "NCCL")
S = TypeVar("S", bound=TrainerSettings)


@dataclass(frozen=True)
class Ranks:
    """This process as one of `count`. Every rank must call the same methods in the same order."""

    count: int
    index: int
    deadline_s: float

    def total(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all ranks, in place."""
        return self._reduced(tensor, dist.ReduceOp.SUM, "a sum")

    def maximum(self, tensor: Tensor) -> Tensor:
        """The largest of each element over all ranks, in place."""
        return self._reduced(tensor, dist.ReduceOp.MAX, "a maximum")

    def from_leader(self, tensor: Tensor, what: str = "a tensor") -> Tensor:
        """Replace a tensor by the leader's, in place."""
        with self.exchange(f"waiting for {what} of rank {LEADER}"):
            dist.broadcast(tensor, src=LEADER)
        return tensor

    @contextlib.contextmanager
    def exchange(self, what: str) -> Iterator[None]:
        """Raises `LostRank` if the block fails because another process ended or is too late."""
        try:
            yield
        except RuntimeError as error:
            is_lost = isinstance(error, dist.DistError) or any(
                name in str(error) for name in _LIBRARIES
            )
            if not is_lost:
                raise
            reason = str(error).splitlines()[0]
            raise LostRank(
                f"rank {self.index} of {self.count}, {what}: another trainer process ended, or did "
                f"not answer for {self.deadline_s:g} s (--rank-deadline-s). The other process's "
                f"log has the cause; then start all processes again ({reason})"
            ) from error

    def _reduced(self, tensor: Tensor, how: dist.ReduceOp.RedOpType, what: str) -> Tensor:
        with self.exchange(f"computing {what} over all ranks"):
            dist.all_reduce(tensor, op=how)
        return tensor


def join(processes: Processes) -> Ranks:
    """Wait until all processes are there.

    Raises:
        LostRank: one of them did not come.
    """
    ranks = Ranks(processes.count, processes.rank, processes.deadline_s)
    # Batches and messages are in host memory: gloo, which notices at once if a process ends.
    backend = BOTH if torch.cuda.is_available() and dist.is_nccl_available() else GLOO
    with ranks.exchange(f"meeting the other ranks at {processes.init_method}"):
        dist.init_process_group(
            backend,
            init_method=processes.init_method,
            world_size=processes.count,
            rank=processes.rank,
            timeout=timedelta(seconds=processes.deadline_s),
        )
        dist.barrier()
    return ranks


def leave() -> None:
    """Close the connections."""
    dist.destroy_process_group()


def settings_of_rank(settings: S, processes: Processes) -> S:
    """The settings with this process's GPU, if there are GPUs."""
    if settings.device not in (AUTO_DEVICE, "cuda") or not torch.cuda.is_available():
        return settings
    return settings.model_copy(update={"device": f"cuda:{processes.local_rank}"})
