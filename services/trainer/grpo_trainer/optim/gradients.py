"""The gradients of a step, added up over its backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

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
        self._in_turn: list[Bucket] = []
        self._sums: list[Callable[[], object]] = []
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

    def begin_adding_up(self, ranks: Ranks) -> None:
        """During the next backward pass, the last one of the step, begin to add up the gradients of
        a bucket over all ranks, in fp32, as soon as the bucket is complete."""
        # On all ranks in one order: a pass begins with the last parameters.
        self._in_turn = sorted(self._buckets, key=lambda b: min(b.indices), reverse=True)
        for bucket in self._buckets:
            bucket.is_complete, bucket.completed = False, partial(self._add_up_complete, ranks)

    @torch.no_grad()
    def _add_up_complete(self, ranks: Ranks) -> None:
        while self._in_turn and self._in_turn[0].is_complete:
            self._sums.append(ranks.begin_total(self._in_turn.pop(0).widened()))

    @torch.no_grad()
    def add_up(self, ranks: Ranks) -> None:
        """Add up the rest, and wait. A parameter may have no gradient on some ranks."""
        for bucket in self._buckets:
            bucket.is_complete, bucket.completed = True, lambda: None
        self._add_up_complete(ranks)
        for wait in self._sums:
            wait()
        self._sums.clear()
        sizes = [len(bucket.indices) for bucket in self._buckets]
        own = torch.tensor([has for bucket in self._buckets for has in bucket.has_gradient])
        has_gradient = torch.split(ranks.total(own.long()).bool(), sizes)
        for bucket, has in zip(self._buckets, has_gradient, strict=True):
            bucket.added_up(has.tolist())

    def clear(self) -> None:
        """Drop all gradients, so that they can be computed again."""
        for bucket in self._buckets:
            bucket.clear()
