"""Optimizers of every kind on one small model, and steps on gradients from a seed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.optim.master_update import BucketPart, MasterUpdate, StochasticRounding
from grpo_trainer.optim.rules import ADAM, Adafactor, Adam, AdamW8bit, AdamW32, StepOptions

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def stochastic() -> StochasticRounding:
    return StochasticRounding(seed=7, device=CPU)


VARIANTS: dict[str, Callable[[], MasterUpdate]] = {
    "adamw": lambda: MasterUpdate(AdamW32()),
    "adamw_8bit": lambda: MasterUpdate(AdamW8bit(CPU)),
    "adamw, bf16 stochastic": lambda: MasterUpdate(AdamW32(), BF16, stochastic()),
    "adamw, bf16 nearest": lambda: MasterUpdate(AdamW32(), BF16),
    "adafactor": lambda: MasterUpdate(Adafactor()),
    "adafactor, bf16 stochastic": lambda: MasterUpdate(Adafactor(), BF16, stochastic()),
    "adamw_8bit, bf16 stochastic": lambda: MasterUpdate(AdamW8bit(CPU), BF16, stochastic()),
}


class Model:
    """Three tensors: one that bitsandbytes quantises, with a last block that is partly filled; one
    that it does not quantise; and one that never gets a gradient."""

    shapes = ((70, 72), (4, 4), (4,))
    names = ("large", "small", "unused")

    def __init__(
        self,
        update: MasterUpdate | None = None,
        dtype: torch.dtype = torch.bfloat16,
        lr: float = 0.01,
        seed: int = 0,
        weight_decay: float = 0.1,
        adam: Adam = ADAM,
    ) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.parameters = [
            nn.Parameter(torch.randn(shape, generator=drawn).to(dtype)) for shape in self.shapes
        ]
        self.optimizer = MasterOptimizer(
            self.parameters, lambda _: lr, weight_decay, max_grad_norm=1.0, update=update, adam=adam
        )

    def gather(self, step: int, micro_batches: int = 1) -> None:
        for micro in range(micro_batches):
            drawn = torch.Generator().manual_seed(1000 * step + micro)
            for parameter in self.parameters[:2]:
                factors = torch.randn(parameter.shape, generator=drawn).to(parameter)
                (parameter * factors).sum().backward()  # type: ignore[no-untyped-call]
            self.optimizer.gradients.gather()

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
        """Copies of a checkpoint's tensors, and of the parameters."""
        held = self.optimizer.tensors(self.names)
        held |= {
            f"parameter/{n}": p.detach() for n, p in zip(self.names, self.parameters, strict=True)
        }
        return {path: tensor.clone() for path, tensor in held.items()}


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not identical, or missing on one side."""
    return sorted(
        path
        for path in ours.keys() | theirs.keys()
        if path not in ours
        or path not in theirs
        or ours[path].dtype != theirs[path].dtype
        or not torch.equal(ours[path], theirs[path])
    )


RATE = 1e-8
"""Learning rate times weight decay: half of float32's resolution below 1."""


def decay_per_step(build: Callable[[], MasterUpdate], size: int) -> float:
    """Average relative decrease per step of a weight between 1 and 2, due to a weight decay of 0.01
    at a learning rate of 1e-6. `RATE` is the right value. Counted from the second step, because the
    first one moves every weight equally."""
    lost = [_after_nine_steps(build(), size, weight_decay) for weight_decay in (0.0, RATE / 1e-6)]
    drift = [float((one[0].double() - one[1].double()).mean()) for one in zip(*lost, strict=True)]
    return (drift[1] - drift[0]) / 8 / 1.5


def _after_nine_steps(
    update: MasterUpdate, size: int, weight_decay: float
) -> tuple[Tensor, Tensor]:
    """The master weights after the first and after the last of nine steps on random gradients."""
    drawn = torch.Generator().manual_seed(3)
    master = 1 + torch.rand(size, generator=drawn)
    state, first = update.rule.initial_state(master, update.rule.kind_of(master)), master
    for step in range(9):
        gradient = torch.randn(size, generator=drawn)
        update.step(BucketPart(master, gradient, state), step + 1, StepOptions(1e-6, weight_decay))
        first = master.clone() if step == 0 else first
    return first, master
