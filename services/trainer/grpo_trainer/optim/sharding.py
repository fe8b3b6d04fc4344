"""The optimizer of one of several ranks, each of which has the whole policy or a part of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grpo_trainer.model.division import Division
from grpo_trainer.optim.buckets import MASTER
from grpo_trainer.optim.master_optimizer import MasterOptimizer
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
                if path in found and _has_rows(whole.shape, shape):
                    found[path] = self._division.divided(found[path], whole.shape)
        return found

    def place(self, path: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if self._division is None or not _has_rows(shape, self._division.shapes[name_of(path)]):
            return super().place(path, shape, dtype)
        own = self._division.own(torch.empty(shape, dtype=dtype, device="meta"))
        return self._division.divided(torch.empty_like(own, device="cpu"), shape)

    @torch.no_grad()
    def load_tensors(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        """Args: tensors: only rank 0 has them, if each rank holds the whole policy"""
        if self._division is not None:
            super().load_tensors(names, tensors)
            return
        counts = Counter(map(name_of, tensors))  # one tensor: the master weights alone
        stepped = torch.tensor([int(counts[name] > 1) for name in names])
        has_state = self._ranks.from_leader(stepped, "a checkpoint").tolist()
        for index, name in enumerate(names):
            whole = torch.empty_like(self.masters[index])
            own = self._kinds(whole) if has_state[index] else {MASTER: whole}
            for kind, place in own.items():
                if self._ranks.leads:
                    place.copy_(tensors[f"{kind}/{name}"])
                self._ranks.from_leader(place, "a checkpoint")
            self._load_one(index, own)


def _has_rows(shape: torch.Size, of_parameter: torch.Size) -> bool:
    """Whether a tensor of the state is divided as its parameter is."""
    return shape[:1] == of_parameter[:1]


def name_of(path: str) -> str:
    """The parameter's name in the path of one of its tensors, `kind/name`."""
    return path.partition("/")[2]
