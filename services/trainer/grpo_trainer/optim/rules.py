"""The update rules: AdamW with moments in fp32, or quantised to 8 bits by bitsandbytes; Adafactor.

A rule works on fp32 weights; `MasterUpdate` stores and rounds them, so rules and roundings combine
freely.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim._adafactor import adafactor
from torch.optim.adamw import adamw

from grpo_trainer.errors import UnusableOptimizer

State = dict[str, Tensor]
"""A rule's state of one parameter, by kind; empty before its first step."""

STEP = "step"
"""The kind that counts a parameter's steps: a float32 scalar."""

EXP_AVG, EXP_AVG_SQ = "exp_avg", "exp_avg_sq"
PART_ELEMENTS = 2**22
"""Number of weights updated at a time: their copies take 16 MiB each. A multiple of 16, because
torch's kernel rounds the last few of a part otherwise."""
BLOCK = 256
"""Number of neighbouring moments that share a scale, fixed by bitsandbytes' kernels."""
MIN_8BIT_ELEMENTS = 4096
"""Smaller parameters have fp32 moments, as in bitsandbytes."""
MAP_VALUES = 256
_SIGNED = {"qmap1": True, "qmap2": False}
"""The maps from 8 bits to values; the first moment can be negative."""
ROW, COLUMN, VECTOR = "row_var", "col_var", "variance"
BETA2_DECAY = -0.8
MAX_UPDATE_RMS = 1.0
"""The paper's section 6: β2 of step t is 1 - t^-0.8, and larger updates are scaled down."""
EPS1 = 1e-15
"""torch squares it, and 1e-30 is the paper's smallest second moment."""
_RELATIVE_LR = 2.0**-40
_NO_DECAY = 0.0
"""`MasterUpdate` adds weight decay."""
_ADAM, _UNUSED = "adam", 0.0


@dataclass(frozen=True)
class Adam:
    """Constants of Adam's rule, named as in arXiv 1412.6980, section 2, whose values they have."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


ADAM = Adam()


@dataclass(frozen=True)
class StepOptions:
    """Options of a step for one parameter. `gradient_scale` clips the gradient norm and divides by
    the loss scale; it is the same for all parameters."""

    lr: float
    weight_decay: float
    gradient_scale: float = 1.0
    adam: Adam = ADAM


class UpdateRule(Protocol):
    """One optimizer's arithmetic, with one way of storing its moments."""

    def initial_state(self, weights: Tensor) -> State:
        """The state before a parameter's first step."""

    def place_of_step(self, weights: Tensor) -> torch.device:  # noqa: ARG002
        """The device of the step counter. Python reads it, which must not wait for a GPU."""
        return torch.device("cpu")

    def restored(self, saved: State, weights: Tensor) -> State:
        """A copy of a checkpoint's state, on the devices that the rule needs."""
        moved = {kind: tensor.to(weights.device, copy=True) for kind, tensor in saved.items()}
        return moved | {STEP: saved[STEP].to(self.place_of_step(weights), copy=True)}

    def parts(
        self, weights: Tensor, gradient: Tensor, state: State
    ) -> Iterator[tuple[Tensor, Tensor, State]]:
        """Parts of `update`'s arguments that can be updated one after the other, so that copies
        are small. Each part of the state must be updated before the next is requested."""
        yield weights, gradient, state

    def update(self, weights: Tensor, gradient: Tensor, state: State, options: StepOptions) -> None:
        """Take one step in place, without weight decay, which `MasterUpdate` adds.

        Args:
            weights: fp32, contiguous
            gradient: of any floating type; may be overwritten
            state: updated in place
        """


class AdamW32(UpdateRule):
    """AdamW (arXiv 1711.05101, algorithm 2) with both moments in fp32 for every type of master
    weights.

    In bf16 the second moment would stop following its gradients: a step changes it by one part in a
    thousand, and bf16 resolves four.
    """

    def initial_state(self, weights: Tensor) -> State:
        return {
            STEP: torch.zeros((), device=self.place_of_step(weights)),
            EXP_AVG: torch.zeros_like(weights, dtype=torch.float32),
            EXP_AVG_SQ: torch.zeros_like(weights, dtype=torch.float32),
        }

    def parts(
        self, weights: Tensor, gradient: Tensor, state: State
    ) -> Iterator[tuple[Tensor, Tensor, State]]:
        gradient = gradient.contiguous()
        if weights.is_cuda:  # as many calls as there are weight tensors
            yield weights, gradient, state
            return
        names = (EXP_AVG, EXP_AVG_SQ)
        flat = (gradient, weights, *(state[name] for name in names))
        split = (torch.split(tensor.view(-1), PART_ELEMENTS) for tensor in flat)
        counted = state[STEP].clone()
        for part_gradient, part_weights, *moments in zip(*split, strict=True):
            state[STEP].copy_(counted)  # each part counts the step
            yield part_weights, part_gradient, {**state, **dict(zip(names, moments, strict=True))}

    def update(self, weights: Tensor, gradient: Tensor, state: State, options: StepOptions) -> None:
        adamw(
            [weights],
            [scaled(gradient, options.gradient_scale)],
            [state[EXP_AVG]],
            [state[EXP_AVG_SQ]],
            [],
            [state[STEP]],
            foreach=False,
            fused=True,
            amsgrad=False,
            beta1=options.adam.beta1,
            beta2=options.adam.beta2,
            lr=options.lr,
            weight_decay=_NO_DECAY,
            eps=options.adam.eps,
            maximize=False,
        )

    def place_of_step(self, weights: Tensor) -> torch.device:
        """The fused kernel reads the counter on the weights' device."""
        return weights.device


def scaled(gradient: Tensor, scale: float) -> Tensor:
    """The gradient in fp32, multiplied by `scale`; overwrites an fp32 gradient."""
    wide = gradient.float()
    return wide if scale == 1.0 else wide.mul_(scale)


class AdamW8bit(UpdateRule):
    """bitsandbytes' AdamW8bit (arXiv 2110.02861), with moments quantised in blocks to 256 values.
    State, limits and results are those of its class `AdamW8bit`. Only the class's functions are
    used, because the class would keep the weights and wait for the GPU after every parameter.

    Kinds of state: step, state1 and state2 (the moments: uint8, or fp32 in small parameters).
    Quantised moments also have absmax1 and absmax2 (scales: [blocks]), and qmap1 and qmap2 (maps:
    [256]).

    Raises:
        UnusableOptimizer: bitsandbytes has no working kernel for `device`.
    """

    def __init__(self, device: torch.device) -> None:
        from bitsandbytes import functional

        self._functional = functional
        self._require_kernel(device)

    def initial_state(self, weights: Tensor) -> State:
        state = empty_8bit_state(weights)
        for kind in state.keys() & _SIGNED:
            state[kind].copy_(self._functional.create_dynamic_map(signed=_SIGNED[kind]))
        return state

    def update(self, weights: Tensor, gradient: Tensor, state: State, options: StepOptions) -> None:
        state[STEP] += 1
        update = self._update_32bit if state["state1"].is_floating_point() else self._update_8bit
        update(weights, gradient.float().contiguous(), state, options)

    def _update_8bit(
        self, weights: Tensor, gradient: Tensor, state: State, options: StepOptions
    ) -> None:
        self._functional.optimizer_update_8bit_blockwise(
            _ADAM,
            gradient,
            weights,
            state["state1"],
            state["state2"],
            options.adam.beta1,
            options.adam.beta2,
            _UNUSED,
            _UNUSED,
            options.adam.eps,
            int(state[STEP]),
            options.lr,
            state["qmap1"],
            state["qmap2"],
            state["absmax1"],
            state["absmax2"],
            _NO_DECAY,
            gnorm_scale=options.gradient_scale,
        )

    def _update_32bit(
        self, weights: Tensor, gradient: Tensor, state: State, options: StepOptions
    ) -> None:
        self._functional.optimizer_update_32bit(
            _ADAM,
            gradient,
            weights,
            state["state1"],
            options.adam.beta1,
            options.adam.eps,
            int(state[STEP]),
            options.lr,
            state["state2"],
            options.adam.beta2,
            weight_decay=_NO_DECAY,
            gnorm_scale=options.gradient_scale,
        )

    def _require_kernel(self, device: torch.device) -> None:
        """Test the kernel: Adam's first step must move every weight by the learning rate."""
        try:
            weights = torch.zeros(MIN_8BIT_ELEMENTS, device=device)
            options = StepOptions(lr=1.0, weight_decay=0.0)
            self.update(weights, torch.ones_like(weights), self.initial_state(weights), options)
            furthest = float((weights + 1.0).abs().max())
        except (RuntimeError, AttributeError) as error:
            raise _no_kernel(device, str(error)) from error
        if not furthest < 1e-3:
            raise _no_kernel(
                device,
                f"after a test of the optimizer with one step, a weight differs by {furthest:.3g} "
                "from the result of Adam's formula",
            )


def empty_8bit_state(weights: Tensor) -> State:
    """The tensors of `AdamW8bit`'s initial state, with maps of zeros. Needs no bitsandbytes."""
    device, is_quantised = weights.device, weights.numel() >= MIN_8BIT_ELEMENTS
    state = {
        kind: torch.zeros_like(weights, dtype=torch.uint8 if is_quantised else torch.float32)
        for kind in ("state1", "state2")
    }
    if is_quantised:
        blocks = -(-weights.numel() // BLOCK)
        state |= {kind: torch.zeros(blocks, device=device) for kind in ("absmax1", "absmax2")}
        # Each parameter has its own maps, so that no two tensors of a checkpoint share memory.
        state |= {kind: torch.zeros(MAP_VALUES, device=device) for kind in _SIGNED}
    return {STEP: torch.zeros(()), **state}


def _no_kernel(device: torch.device, why: str) -> UnusableOptimizer:
    return UnusableOptimizer(
        f"--optimizer adamw_8bit: bitsandbytes has no working 8-bit optimizer for {device} "
        f"({why}); pass --optimizer adamw, or see `python -m bitsandbytes`"
    )


class Adafactor(UpdateRule):
    """Adafactor (arXiv 1804.04235, algorithms 4 and 5) in fp32. The step size is the learning rate
    itself, not a fraction of the weights' size.

    Kinds of state: step; row_var and col_var in matrices; variance in vectors.
    """

    def initial_state(self, weights: Tensor) -> State:
        shape, device = weights.shape, weights.device
        if weights.dim() < 2:
            moments = {VECTOR: torch.zeros(shape, device=device)}
        else:
            moments = {
                ROW: torch.zeros((*shape[:-1], 1), device=device),
                COLUMN: torch.zeros((*shape[:-2], 1, shape[-1]), device=device),
            }
        return {STEP: torch.zeros(()), **moments}

    def update(self, weights: Tensor, gradient: Tensor, state: State, options: StepOptions) -> None:
        adafactor(
            [weights],
            [scaled(gradient, options.gradient_scale)],
            [state.get(ROW)],
            [state.get(COLUMN)],
            [state.get(VECTOR)],
            [state[STEP]],
            d=MAX_UPDATE_RMS,
            # torch's step size is min(lr, 1 / sqrt(step)) times the RMS of the weights, or times
            # eps2 if that is larger. With these two values the step size is the learning rate.
            lr=_RELATIVE_LR,
            eps2=options.lr / _RELATIVE_LR,
            beta2_decay=BETA2_DECAY,
            weight_decay=_NO_DECAY,
            eps1=EPS1,
            maximize=False,
        )
