"""The optimizer of one of several ranks, each of which has the whole policy or a part of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grpo_trainer.model.division import Division
from grpo_trainer.optim.buckets import MASTER
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.optim.rules import BLOCK, State
from grpo_trainer.ranks import Ranks


class RankOptimizer(MasterOptimizer):
    """The optimizer of one of several ranks. All ranks take the same steps, so no weights are sent
    after a step.

    Every rank calls `step` and `load_tensors`.

    Args:
        division: None if each rank holds the whole policy
    """

    def __init__(
        self,
        ranks: Ranks,
        division: Division | None,
        parameters: Iterable[nn.Parameter],
        **options: Any,
    ) -> None:
        total = None if division is None else ranks.total
        super().__init__(parameters, total=total, **options)
        self._ranks, self._division = ranks, division

    @property
    def parts(self) -> int:
        return 1 if self._division is None else self._ranks.count

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().tensors(names)
        if self._division is None:
            return found
        for name, shape in self._division.shapes.items():
            for kind, whole in self._kinds(torch.empty(shape, device="meta")).items():
                path = f"{kind}/{name}"
                if path in found and self._has_rows(kind):
                    found[path] = self._division.divided(found[path], whole.shape)
                elif path in found and kind in self.update.rule.spans:
                    found[path] = self._blocks_of_ranks(found[path], shape)
        return found

    def _blocks_of_ranks(self, own: Tensor, shape: torch.Size) -> Tensor:
        """What each block of weights has, of all ranks: [ranks, blocks]."""
        assert self._division is not None
        blocks = -(-(-(-shape[0] // self.parts) * shape[1:].numel()) // BLOCK)
        padded = nn.functional.pad(own, (0, blocks - len(own)))[None]
        return self._division.divided(padded, torch.Size((self.parts, blocks)))

    def _has_rows(self, kind: str) -> bool:
        """Whether a whole tensor of the state is divided as its parameter is."""
        return kind == MASTER or self.update.rule.spans.get(kind) == 1

    def place(self, path: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if self._division is None or not self._has_rows(path.partition("/")[0]):
            return super().place(path, shape, dtype)
        own = self._division.own(torch.empty(shape, dtype=dtype, device="meta"))
        return self._division.divided(torch.empty_like(own, device="cpu"), shape)

    @torch.no_grad()
    def load_tensors(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        """Args: tensors: not read on ranks above 0, if each rank holds the whole policy"""
        if self._division is not None:
            super().load_tensors(names, tensors)
            return
        if self._ranks.leads:
            super().load_tensors(names, tensors)
        for bucket in self.buckets:
            bucket.steps = self._ranks.broadcast(bucket.steps, "a checkpoint")
            for tensor in bucket.flat():
                self._ranks.from_leader(tensor, "a checkpoint")

    def _fitted(self, saved: State, shape: torch.Size) -> State:
        index = 0 if self._division is None else self._ranks.index
        return self.update.rule.fitted(saved, shape, index, self.parts)
