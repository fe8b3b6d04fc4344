"""Digests of the master weights: of all versions on a CPU, of those that are saved on a GPU.

On a CPU a thread computes them from one update to the next. A step on a GPU may take less time than
copying and hashing all weights, so there they are computed before a checkpoint is written, while no
step waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from grpo_core.provenance.digest import TENSOR_DIGITS, joined, tensor_digest
from grpo_core.provenance.records import Facts
from grpo_trainer.atomic_files import DTYPES, pieces_of
from grpo_trainer.ranks import Orders

BEGIN_DIGESTS, SAVED_DIGESTS = "begin digests", "finish saved digests"
"""Orders of rank 0."""
_BYTES = TENSOR_DIGITS // 2


class WeightDigests:
    """All ranks call the same methods in the same order. The weights must not change from `begin`
    to `finish`.

    Args:
        masters: this rank's
        orders: of rank 0 while it works alone
        parts: number of ranks among which each tensor is divided; 1 if rank 0 has all
    """

    def __init__(self, masters: Sequence[Tensor], orders: Orders, parts: int = 1) -> None:
        self._masters, self._parts = masters, parts
        self._orders, self._ranks = orders, orders.ranks
        self._are_due = False
        self._pending: Future[list[str]] | None = None
        self._thread = ThreadPoolExecutor(1, "digests")

    @property
    def every_step(self) -> bool:
        return self._masters[0].device.type == "cpu"

    def begin(self) -> None:
        """The weights are new: compute their digests, on a GPU not before `finish_saved`."""
        self._orders.give(BEGIN_DIGESTS)
        self._are_due = self._ranks.leads or self._parts > 1
        if self.every_step:
            self._compute()

    def _compute(self) -> None:
        if self._are_due:
            self._are_due = False
            self._pending = self._thread.submit(lambda: [*map(_digest_of, self._masters)])

    def finish_saved(self) -> list[str] | None:
        """As `finish`, of weights that are saved. None if they had their digests before."""
        self._compute()
        return self.finish()

    def finish(self) -> list[str] | None:
        """The digest of each tensor. None on ranks above 0, or if none were begun."""
        if self._pending is None:
            return None
        own, self._pending = self._pending.result(), None
        if self._parts == 1:
            return own
        sent = torch.zeros(self._parts, len(own), _BYTES, dtype=torch.uint8)
        rows = [list(bytes.fromhex(digest)) for digest in own]
        self._orders.give(SAVED_DIGESTS)
        sent[self._ranks.index] = torch.tensor(rows, dtype=torch.uint8)
        whole = self._ranks.total(sent).tolist()
        if not self._ranks.leads:
            return None
        parts = [[bytes(row).hex() for row in part] for part in whole]
        return [joined(of_ranks) for of_ranks in zip(*parts, strict=True)]


def digests_of(masters: Sequence[Tensor], parts: int) -> list[str]:
    """The digest of each whole tensor, as `parts` ranks that divide its rows compute it."""
    return [joined([*map(_digest_of, _rows(m, parts))]) for m in masters]


def _rows(whole: Tensor, parts: int) -> list[Tensor]:
    """As FSDP2 divides them: the last ranks may have none."""
    found = whole.chunk(parts)
    return [*found, *[whole[:0]] * (parts - len(found))]


def facts_of(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> list[Facts]:
    """Args: shapes: of the whole tensors, by name; dtype: of the master weights"""
    return [(name, DTYPES[str(dtype)], shape) for name, shape in shapes.items()]


def _digest_of(tensor: Tensor) -> str:
    return tensor_digest(pieces_of(tensor))
