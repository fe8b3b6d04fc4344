"""Optimizers of every kind on one small model, and steps on gradients that a seed decides."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from grpo_trainer.optimizer import MasterOptimizer
from grpo_trainer.updates.adamw import AdamW32
from grpo_trainer.updates.adamw_8bit import AdamW8bit
from grpo_trainer.updates.base import MasterUpdate
from grpo_trainer.updates.masters import Bfloat16Masters, Float32Masters
from grpo_trainer.updates.rounding import Nearest, Stochastic

CPU = torch.device("cpu")


def stochastic() -> Stochastic:
    return Stochastic(seed=7, device=CPU)


VARIANTS: dict[str, Callable[[], MasterUpdate]] = {
    "adamw": lambda: Float32Masters(AdamW32()),
    "adamw, torch's fused": lambda: Float32Masters(AdamW32(fused=True)),
    "adamw_8bit": lambda: Float32Masters(AdamW8bit(CPU)),
    "adamw, bf16 stochastic": lambda: Bfloat16Masters(AdamW32(), stochastic()),
    "adamw, bf16 nearest": lambda: Bfloat16Masters(AdamW32(), Nearest()),
    "adamw_8bit, bf16 stochastic": lambda: Bfloat16Masters(AdamW8bit(CPU), stochastic()),
}


class Model:
    """Three tensors: one that bitsandbytes quantises, with a last block that is not full, one that
    it does not, and one that never gets a gradient."""

    shapes = ((70, 71), (5, 3), (4,))
    names = ("large", "small", "unused")

    def __init__(
        self,
        update: MasterUpdate | None = None,
        dtype: torch.dtype = torch.bfloat16,
        lr: float = 0.01,
        seed: int = 0,
    ) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.parameters = [
            nn.Parameter(torch.randn(shape, generator=drawn).to(dtype)) for shape in self.shapes
        ]
        self.optimizer = MasterOptimizer(
            self.parameters, lr, 0, weight_decay=0.1, max_grad_norm=1.0, update=update
        )

    def gather(self, step: int, micro_batches: int = 1) -> None:
        for micro in range(micro_batches):
            drawn = torch.Generator().manual_seed(1000 * step + micro)
            for parameter in self.parameters[:2]:
                factors = torch.randn(parameter.shape, generator=drawn).to(parameter)
                (parameter * factors).sum().backward()  # type: ignore[no-untyped-call]

    def step(self, step: int, micro_batches: int = 1) -> float:
        self.gather(step, micro_batches)
        return self.optimizer.step(step)

    def steps(self, first: int, beyond: int) -> list[float]:
        norms = []
        for step in range(first, beyond):
            norms.append(self.step(step, micro_batches=1 + step % 2))
            self.optimizer.write_into_parameters()
        return norms

    def tensors(self) -> dict[str, Tensor]:
        """Copies of all that a state holds, and of the parameters."""
        held = self.optimizer.tensors(self.names)
        held |= {
            f"parameter/{n}": p.detach() for n, p in zip(self.names, self.parameters, strict=True)
        }
        return {path: tensor.clone() for path, tensor in held.items()}


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Paths that are not the same to the last bit, or not on both sides."""
    return sorted(
        path
        for path in ours.keys() | theirs.keys()
        if path not in ours
        or path not in theirs
        or ours[path].dtype != theirs[path].dtype
        or not torch.equal(ours[path], theirs[path])
    )
