"""The update rules: AdamW with moments in fp32, or quantised to 8 bits by bitsandbytes; Adafactor.

A rule works on fp32 weights; `MasterUpdate` stores and rounds them, so rules and roundings combine
freely. On a GPU, `kernel` computes AdamW in place of the two classes here, which then only check
its results.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim._adafactor import adafactor
from torch.optim.adamw import adamw

from grpo_trainer.errors import UnusableOptimizer

State = dict[str, Tensor]
"""A rule's state of a parameter, a bucket or a part of it, by kind; empty before its first step."""

STEP = "step"
"""The kind that counts a parameter's steps in a checkpoint: a float32 scalar."""

EXP_AVG, EXP_AVG_SQ = "exp_avg", "exp_avg_sq"
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
    """Options of a step for one bucket. `gradient_scale` clips the gradient norm and divides by
    the loss scale; it is the same for all buckets."""

    lr: float
    weight_decay: float
    gradient_scale: float = 1.0
    adam: Adam = ADAM


class UpdateRule(Protocol):
    """One optimizer's arithmetic, with one way of storing its moments.

    Attributes:
        is_elementwise: a weight's update depends on its own gradients alone, so a part of a tensor,
            or several in one, can be updated
        alignment: number of weights of which an elementwise update's first is a multiple
        spans: number of weights per entry of each kind of state; other kinds belong to all weights
    """

    is_elementwise: bool = True
    alignment: int = 1
    spans: Mapping[str, int]

    def kind_of(self, weights: Tensor) -> Hashable:  # noqa: ARG002
        """Parameters of one kind have states that can be in one tensor."""
        return None

    def initial_state(self, weights: Tensor, kind: Hashable) -> State:
        """The state before the first step. Args: kind: of each parameter in `weights`"""

    def fitted(
        self,
        saved: State,
        shape: torch.Size,  # noqa: ARG002
        index: int,  # noqa: ARG002
        count: int,  # noqa: ARG002
    ) -> State:
        """A saved state of one of `count` parts, which another number of ranks may have saved.

        Args: shape: of the whole parameter
        """
        return saved

    def update(
        self, weights: Tensor, gradient: Tensor, state: State, step: int, options: StepOptions
    ) -> None:
        """Take one step in place, without weight decay, which `MasterUpdate` adds.

        Args:
            weights: fp32, contiguous
            gradient: of any floating type; may be overwritten
            state: updated in place
            step: counted from 1
        """


class AdamW32(UpdateRule):
    """AdamW (arXiv 1711.05101, algorithm 2) with both moments in fp32 for every type of master
    weights.

    In bf16 the second moment would stop following its gradients: a step changes it by one part in a
    thousand, and bf16 resolves four.
    """

    alignment = BLOCK
    """Of `kernel`. torch's kernel for CPUs needs 16, or rounds the last few otherwise."""
    spans: Mapping[str, int] = {EXP_AVG: 1, EXP_AVG_SQ: 1}

    def initial_state(self, weights: Tensor, kind: Hashable = None) -> State:  # noqa: ARG002
        return {kind: torch.zeros_like(weights, dtype=torch.float32) for kind in self.spans}

    def update(
        self, weights: Tensor, gradient: Tensor, state: State, step: int, options: StepOptions
    ) -> None:
        adamw(
            [weights],
            [scaled(gradient, options.gradient_scale)],
            [state[EXP_AVG]],
            [state[EXP_AVG_SQ]],
            [],
            [torch.full((), step - 1.0, device=weights.device)],  # the kernel counts
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


def scaled(gradient: Tensor, scale: float) -> Tensor:
    """The gradient in fp32, multiplied by `scale`; overwrites an fp32 gradient."""
    wide = gradient.float()
    return wide if scale == 1.0 else wide.mul_(scale)


class AdamW8bit(UpdateRule):
    """bitsandbytes' AdamW8bit (arXiv 2110.02861), with moments quantised in blocks to 256 values.
    State, limits and results are those of its class `AdamW8bit`. Only the class's functions are
    used, because the class would keep the weights and wait for the GPU after every parameter.

    Kinds of state: state1 and state2 (the moments: uint8, or fp32 in small parameters). Quantised
    moments also have absmax1 and absmax2 (scales: [blocks]; of several ranks, each of which has
    blocks of its own rows: [ranks, blocks]), and qmap1 and qmap2 (maps: [256]).

    Raises:
        UnusableOptimizer: bitsandbytes has no working kernel for `device`.
    """

    alignment = BLOCK
    spans: Mapping[str, int] = {"state1": 1, "state2": 1, "absmax1": BLOCK, "absmax2": BLOCK}

    def __init__(self, device: torch.device) -> None:
        from bitsandbytes import functional

        self._functional = functional
        self._require_kernel(device)

    def kind_of(self, weights: Tensor) -> Hashable:
        """Whether the moments are quantised."""
        return is_quantised(weights)

    def initial_state(self, weights: Tensor, kind: Hashable) -> State:
        state = empty_8bit_state(weights, bool(kind))
        for kind in state.keys() & _SIGNED:
            state[kind].copy_(self._functional.create_dynamic_map(signed=_SIGNED[kind]))
        return state

    def fitted(self, saved: State, shape: torch.Size, index: int, count: int) -> State:
        """Blocks that other ones have divided are quantised again."""
        if "absmax1" not in saved:
            return saved
        saved = {kind: tensor.cpu() for kind, tensor in saved.items()}
        found, parts = dict(saved), saved["absmax1"].shape[:-1].numel()
        of_saved, of_own = (-(-shape[0] // n) * shape[1:].numel() for n in (parts, count))
        at = torch.arange(saved["state1"].numel()) + min(index * of_own, shape.numel())
        for absmax, state, qmap in (("absmax1", "state1", "qmap1"), ("absmax2", "state2", "qmap2")):
            scales = saved[absmax].view(parts, -1)[at // of_saved, at % of_saved // BLOCK]
            found[absmax] = scales[::BLOCK]
            if not torch.equal(found[absmax].repeat_interleave(BLOCK)[: len(scales)], scales):
                moments = saved[qmap][saved[state].flatten().int()] * scales
                bits, blocks = self._functional.quantize_blockwise(
                    moments, code=saved[qmap], blocksize=BLOCK
                )
                found[state], found[absmax] = bits.view_as(saved[state]), blocks.absmax
        return found

    def update(
        self, weights: Tensor, gradient: Tensor, state: State, step: int, options: StepOptions
    ) -> None:
        update = self._update_32bit if state["state1"].is_floating_point() else self._update_8bit
        update(weights, gradient.float(), state, step, options)

    def _update_8bit(
        self, weights: Tensor, gradient: Tensor, state: State, step: int, options: StepOptions
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
            step,
            options.lr,
            state["qmap1"],
            state["qmap2"],
            state["absmax1"],
            state["absmax2"],
            _NO_DECAY,
            gnorm_scale=options.gradient_scale,
        )

    def _update_32bit(
        self, weights: Tensor, gradient: Tensor, state: State, step: int, options: StepOptions
    ) -> None:
        self._functional.optimizer_update_32bit(
            _ADAM,
            gradient,
            weights,
            state["state1"],
            options.adam.beta1,
            options.adam.eps,
            step,
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
            state = self.initial_state(weights, True)
            self.update(weights, torch.ones_like(weights), state, 1, options)
            furthest = float((weights + 1.0).abs().max())
        except (RuntimeError, AttributeError) as error:
            raise _no_kernel(device, str(error)) from error
        if not furthest < 1e-3:
            raise _no_kernel(
                device,
                f"after a test of the optimizer with one step, a weight differs by {furthest:.3g} "
                "from the result of Adam's formula",
            )


def is_quantised(weights: Tensor) -> bool:
    """Whether `AdamW8bit` quantises the moments of a parameter."""
    return weights.numel() >= MIN_8BIT_ELEMENTS


def empty_8bit_state(weights: Tensor, is_quantised: bool) -> State:
    """The tensors of `AdamW8bit`'s initial state, with maps of zeros. Needs no bitsandbytes."""
    device, dtype = weights.device, torch.uint8 if is_quantised else torch.float32
    state = {kind: torch.zeros_like(weights, dtype=dtype) for kind in ("state1", "state2")}
    if is_quantised:
        blocks = -(-weights.numel() // BLOCK)
        state |= {kind: torch.zeros(blocks, device=device) for kind in ("absmax1", "absmax2")}
        state |= {kind: torch.zeros(MAP_VALUES, device=device) for kind in _SIGNED}
    return state


def _no_kernel(device: torch.device, why: str) -> UnusableOptimizer:
    return UnusableOptimizer(
        f"--optimizer adamw_8bit: bitsandbytes has no working 8-bit optimizer for {device} "
        f"({why}); pass --optimizer adamw, or see `python -m bitsandbytes`"
    )


class Adafactor(UpdateRule):
    """Adafactor (arXiv 1804.04235, algorithms 4 and 5) in fp32. The step size is the learning rate
    itself, not a fraction of the weights' size.

    Kinds of state: row_var and col_var in matrices; variance in vectors.
    """

    is_elementwise = False
    spans: Mapping[str, int] = {}

    def initial_state(self, weights: Tensor, kind: Hashable = None) -> State:  # noqa: ARG002
        shape, device = weights.shape, weights.device
        if weights.dim() < 2:
            return {VECTOR: torch.zeros(shape, device=device)}
        return {
            ROW: torch.zeros((*shape[:-1], 1), device=device),
            COLUMN: torch.zeros((*shape[:-2], 1, shape[-1]), device=device),
        }

    def update(
        self, weights: Tensor, gradient: Tensor, state: State, step: int, options: StepOptions
    ) -> None:
        adafactor(
            [weights],
            [scaled(gradient, options.gradient_scale)],
            [state.get(ROW)],
            [state.get(COLUMN)],
            [state.get(VECTOR)],
            [torch.tensor(step - 1.0)],  # torch counts
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
