"""The gradients of a step, added up over its backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_trainer.optim.buckets import Bucket, in_order
from grpo_trainer.ranks import Ranks


class Gradients:
    """Args: total: adds up a number over all ranks, in place, if each of them has a part of every
    gradient"""

    def __init__(
        self, buckets: Sequence[Bucket], total: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._buckets, self._total = buckets, total
        self._norm = 0.0
        self._norm_of: list[int] = []

    @property
    def tensors(self) -> list[Tensor | None]:
        """Of each parameter: views."""
        return in_order(self._buckets, Bucket.gradients)

    def gather(self) -> None:
        """Take the gradients from the parameters after a backward pass, in which some of them may
        have had none."""
        for bucket in self._buckets:
            bucket.gather()

    def norm(self) -> float:
        """L2 norm over all gradients, in fp32. Waits for the device, once until the gradients
        change."""
        changes = [bucket.changes for bucket in self._buckets]
        if changes == self._norm_of:
            return self._norm
        norms = [bucket.row_norms() for bucket in self._buckets if bucket.gradient is not None]
        norm = torch.linalg.vector_norm(torch.cat(norms)) if norms else torch.zeros(())
        self._norm = float(norm if self._total is None else self._total(norm.square()).sqrt())
        self._norm_of = changes
        return self._norm

    @torch.no_grad()
    def add_up(self, ranks: Ranks) -> None:
        """Add up the gradients of all ranks, in fp32. A parameter may have none on some ranks."""
        for bucket in self._buckets:
            has = ranks.total(torch.tensor(bucket.has_gradient, dtype=torch.int64))
            bucket.add_up(ranks.total, has.bool().tolist())

    def clear(self) -> None:
        """Drop all gradients, so that they can be computed again."""
        for bucket in self._buckets:
            bucket.clear()
