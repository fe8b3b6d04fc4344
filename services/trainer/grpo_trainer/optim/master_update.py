"""Updates master weights in fp32, or in bf16 with stochastic rounding, at the step's learning rate.

A bf16 number is the upper half of an fp32 number's bits. The lower 16 bits measure the distance
from the bf16 number nearer to 0 to the next one. Adding a uniform random 16-bit number before
cutting them off rounds up with a probability equal to that distance. So the expected result is the
fp32 number itself (stochastic rounding: Gupta et al. 2015, arXiv 1502.02551, section 3).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import structlog
import torch
from torch import Tensor

from grpo_core.tree.optim import (
    BITSANDBYTES,
    BITSANDBYTES_PIN,
    OptimizerName,
)
from grpo_core.tree.trainer import TrainerSettings
from grpo_trainer.errors import MissingPackage, UnusableOptimizer
from grpo_trainer.optim.rules import (
    Adafactor,
    AdamW8bit,
    AdamW32,
    State,
    StepOptions,
    UpdateRule,
)

log = structlog.get_logger()

LOWER_BITS = 16
CHUNK_ELEMENTS = 1 << 24
"""Number of weights rounded at a time; needs three times 64 MiB beside the weights."""


@dataclass(frozen=True)
class BucketPart:
    """Weights that are updated together, as views: all of one tensor, or some of a flat one.

    Args:
        master: their master weights, contiguous
        gradient: of any floating type; may be overwritten
        state: of the rule
        staged: where to round the new weights to the parameters' type; may be the gradient. None:
            they have that type
    """

    master: Tensor
    gradient: Tensor
    state: State
    staged: Tensor | None = None


Kernel = Callable[[BucketPart, int, StepOptions, int | None], None]
"""Args: the part; the step, counted from 1; the options; a seed for stochastic rounding"""


@dataclass(eq=False)
class MasterUpdate:
    """Updates master weights of one data type.

    In fp32 every update counts, however small. bf16 takes half the memory: the update is computed
    in fp32 and its result is rounded. With stochastic rounding, an update below bf16's precision
    changes some weights by more, and the mean is right. With rounding to the nearest it is lost.

    Decoupled weight decay (arXiv 1711.05101, algorithm 2) is added to the rule's update, and both
    are applied at once. Libraries multiply by 1 - lr * weight decay first. If that product is below
    6e-8, fp32 rounds the factor to 1, and nothing changes.

    Args:
        dtype: float32 or bfloat16
        rounding: how to round to bfloat16; None: to the nearest
        kernel: does all of it at once; None: some passes over the weights around the rule's
    """

    rule: UpdateRule
    dtype: torch.dtype = torch.float32
    rounding: StochasticRounding | None = None
    kernel: Kernel | None = None

    def begin_step(self, index: int) -> None:
        """Prepare for the step with this index, counted from 0."""
        if self.rounding is not None:
            self.rounding.begin_step(index)

    def step(self, part: BucketPart, step: int, options: StepOptions) -> None:
        """Update master weights in place, and stage them. Args: step: counted from 1"""
        if self.kernel is not None:
            seed = None if self.rounding is None else self.rounding.next_seed()
            self.kernel(part, step, options, seed)
            return
        master = part.master
        wide = master.float()  # no copy if they are fp32
        self._update(wide, part, step, options)
        if self.rounding is not None:
            self.rounding.round_into(master, wide)
        elif wide is not master:
            master.copy_(wide)
        if part.staged is not None:
            part.staged.copy_(master)

    def _update(self, weights: Tensor, part: BucketPart, step: int, options: StepOptions) -> None:
        """Args: weights: fp32, changed in place."""
        decay = options.lr * options.weight_decay
        if decay == 0:
            self.rule.update(weights, part.gradient, part.state, step, options)
            return
        change = torch.zeros_like(weights)
        self.rule.update(change, part.gradient, part.state, step, options)
        weights.add_(change.sub_(weights, alpha=decay))


class StochasticRounding:
    """Rounds to one of the two neighbouring bf16 numbers at random. The random numbers depend only
    on `seed` and the step, so a resumed run draws the same ones without saving them.

    Args:
        device: of the weights
        part: ranks with other weights draw other numbers
    """

    def __init__(self, seed: int, device: torch.device, part: int = 0) -> None:
        self._seed = f"{seed}/{part}" if part else f"{seed}"
        self._generator = torch.Generator(device)

    def begin_step(self, index: int) -> None:
        # Use a hash, so that neighbouring seeds and steps give unrelated random numbers.
        self._seeds = random.Random(f"{self._seed}/{index}")
        self._generator.manual_seed(self._seeds.getrandbits(63))

    def next_seed(self) -> int:
        """A seed for another generator, below 2^31: a new one with each call of a step."""
        return self._seeds.getrandbits(31)

    def round_into(self, target: Tensor, wide: Tensor) -> None:
        """Args: target: bf16; wide: fp32 of the same shape; both contiguous."""
        for low, high in zip(_chunks(target), _chunks(wide), strict=True):
            low.copy_(self._rounded(high))

    def _rounded(self, wide: Tensor) -> Tensor:
        """Round to values of bf16, still in fp32. Infinities stay, because their lower bits are 0.
        NaN is restored afterwards, because adding to its bits may give a number."""
        noise = torch.empty_like(wide, dtype=torch.int32)
        noise.random_(0, 1 << LOWER_BITS, generator=self._generator)
        bits = noise.add_(wide.view(torch.int32)).bitwise_and_(-(1 << LOWER_BITS))
        return torch.where(wide.isnan(), wide, bits.view(torch.float32))


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor.view(-1), CHUNK_ELEMENTS)


def build_update(
    settings: TrainerSettings, parameters: Sequence[Tensor], part: int = 0
) -> MasterUpdate:
    """Args: parameters: all trained parameters, on one device; part: number of the rank that has a
    part of each, and rounds it with random numbers of its own

    Raises:
        UnusableOptimizer: the weights or their device do not fit the options.
        MissingPackage: the device's default optimizer needs a package that is not installed.
    """
    device = parameters[0].device
    rule = _rule(settings.optimizer_on(device.type), device)
    kernel = _kernel(rule, device) if device.type == "cuda" else None
    if settings.master_dtype == "float32":
        return MasterUpdate(rule, kernel=kernel)
    _require_bfloat16(parameters)
    return MasterUpdate(rule, torch.bfloat16, _rounding(settings, part, device), kernel)


def _kernel(rule: UpdateRule, device: torch.device) -> Kernel | None:
    """One kernel for all of the update, if it gives the rule's results."""
    if not rule.is_elementwise:
        return None
    try:
        from grpo_trainer.optim import kernel
    except ImportError as error:
        why = f"{error}; Triton comes with torch's builds for CUDA"
    else:
        if not (why := kernel.difference(rule, device)):
            return kernel.update
    log.warning(
        "optimizer.slower", reason=why, hint="weight decay and rounding are passes of their own"
    )
    return None


def _rule(name: OptimizerName, device: torch.device) -> UpdateRule:
    if name == "adafactor":
        return Adafactor()
    if name == "adamw":
        return AdamW32()
    if find_spec(BITSANDBYTES) is None:
        raise MissingPackage(
            f"--optimizer adamw_8bit, the default on a GPU, needs the package {BITSANDBYTES}: "
            f"run pip install {BITSANDBYTES_PIN}, or pass another --optimizer"
        )
    return AdamW8bit(device)


def _rounding(
    settings: TrainerSettings, part: int, device: torch.device
) -> StochasticRounding | None:
    if settings.rounding != "nearest":
        return StochasticRounding(settings.seed, device, part)
    log.warning(
        "rounding.loses_updates",
        lr=settings.lr,
        reason="--rounding nearest loses updates that are too small for bfloat16: of 1,000 "
        "weights, a step changes about 5 at a learning rate of 1e-6, 35 at 1e-5, and 270 at 1e-4",
        hint="pass --rounding stochastic, or --master-dtype float32",
    )
    return None


def _require_bfloat16(parameters: Sequence[Tensor]) -> None:
    others = Counter(p.dtype for p in parameters if p.dtype != torch.bfloat16)
    if others:
        found = " and ".join(
            f"{str(dtype).removeprefix('torch.')} ({count} of {len(parameters)} tensors)"
            for dtype, count in others.items()
        )
        raise UnusableOptimizer(
            f"--master-dtype bfloat16: the weights are in {found}, and bfloat16 would lose part of "
            "their precision; pass --master-dtype float32, or serve the model in bfloat16"
        )
