"""The optimizer of one rank. All ranks take the same steps, so no weights are sent after a step.

With FSDP2, each rank holds a part of every tensor: some neighbouring rows. Checkpoints hold whole
tensors, so they do not depend on the number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grpo_trainer.optim.master_optimizer import MASTER, MasterOptimizer
from grpo_trainer.ranks.group import LEADER, Ranks
from grpo_trainer.ranks.messages import Command
from grpo_trainer.ranks.sharding import Sharded

Tell = Callable[..., None]
"""Args: the command and its numbers. The leader's tells the other ranks to follow; theirs is to do
nothing."""


class RankOptimizer(MasterOptimizer):
    """Args:
    tell: called before each method in which all ranks take part
    sharded: None if each rank holds the whole policy
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        ranks: Ranks,
        tell: Tell,
        sharded: Sharded | None,
        **options: Any,
    ) -> None:
        super().__init__(parameters, **options)
        self._ranks, self._tell, self._sharded = ranks, tell, sharded
        if sharded is not None:
            self.gradients.total = ranks.total

    def step(self, step: int) -> float:
        self._tell(Command.STEP, step)
        return super().step(step)

    def write_into_parameters(self) -> None:
        self._tell(Command.WRITE)
        super().write_into_parameters()
        if self._sharded is not None:
            with self._ranks.exchange("collecting the weights"):
                self._sharded.write_into_whole()

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Whole tensors, in host memory if the policy is sharded. A follower takes part and keeps
        none of them: together they are as large as the state of all ranks."""
        if self._sharded is None:
            return super().tensors(names)
        self._tell(Command.COLLECT_STATE)
        found: dict[str, Tensor] = {}
        for path, part in super().tensors(names).items():
            with self._ranks.exchange("collecting the optimizer's state"):
                whole = self._sharded.collected(name_of(path), part)
            if self._ranks.index == LEADER:
                found[path] = whole.cpu()
        return found

    @torch.no_grad()
    def load_tensors(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        """Load one parameter at a time, so that no rank holds a second state.

        Args: tensors: whole ones on the leader; not read on other ranks
        """
        self._tell(Command.LOAD_STATE)
        counts = Counter(map(name_of, tensors))  # one tensor: the master weights alone
        stepped = torch.tensor([int(counts[name] > 1) for name in names])
        has_state = self._ranks.from_leader(stepped, "a checkpoint").tolist()
        for index, name in enumerate(names):
            whole = self._whole_like(name, self.masters[index])
            state = self._update.initial_state(whole) if has_state[index] else {}
            own: dict[str, Tensor] = {}
            for kind, place in {MASTER: whole, **state}.items():
                if self._ranks.index == LEADER:
                    place.copy_(tensors[f"{kind}/{name}"])
                own[kind] = self._own(self._ranks.from_leader(place, "a checkpoint"))
            self._load_one(index, own)

    def _whole_like(self, name: str, master: Tensor) -> Tensor:
        shape = master.shape if self._sharded is None else self._sharded.shape(name)
        return torch.empty(shape, dtype=master.dtype, device=master.device)

    def _own(self, whole: Tensor) -> Tensor:
        return whole if self._sharded is None else self._sharded.own(whole)


def name_of(path: str) -> str:
    """The parameter's name in the path of one of its tensors, `kind/name`."""
    return path.partition("/")[2]
