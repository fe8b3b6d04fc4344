"""AdamW on fp32 master weights in one pass over memory (`--fused-step`); needs Triton.

The kernel writes the rounded weights into a staging copy, not into the served weights. A step on
the served weights would have to run during the pause and move 30 bytes per weight; copying the
staged weights moves 4. The copy can also be repeated on a restarted server, but a step cannot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_trainer.optim.adamw import (
    EXP_AVG,
    EXP_AVG_SQ,
    STEP,
    AdamW32,
    State,
    StepOptions,
)
from grpo_trainer.optim.masters import Masters

BLOCK = 1024


class FusedAdamW(Masters):
    """Master weights in fp32. Their state is that of `AdamW32`, so a checkpoint resumes with
    either."""

    def __init__(self) -> None:
        super().__init__(AdamW32())

    def step(
        self,
        master: Tensor,
        gradient: Tensor,
        state: State,
        options: StepOptions,
        served: torch.dtype,
    ) -> Tensor | None:
        low = None if served == master.dtype else torch.empty_like(master, dtype=served)
        state[STEP] += 1
        steps, count = float(state[STEP]), master.numel()
        with torch.cuda.device_of(master):  # type: ignore[no-untyped-call]
            adamw_kernel[(-(-count // BLOCK),)](
                master,
                state[EXP_AVG],
                state[EXP_AVG_SQ],
                gradient.contiguous(),
                master if low is None else low,
                count,
                options.gradient_scale,
                options.lr * options.weight_decay,
                options.lr / (1 - options.adam.beta1**steps),
                (1 - options.adam.beta2**steps) ** 0.5,
                BETA1=options.adam.beta1,
                BETA2=options.adam.beta2,
                EPS=options.adam.eps,
                WRITES_LOW=low is not None,
                BLOCK=BLOCK,
            )
        return low


# Triton also compiles the annotations, and supports only `tl.constexpr` among them.
@triton.jit  # type: ignore[untyped-decorator]
def adamw_kernel(  # type: ignore[no-untyped-def]
    master,
    exp_avg,
    exp_avg_sq,
    gradient,
    low,
    count,
    gradient_scale,
    decay,
    step_size,
    bias_correction2_sqrt,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    WRITES_LOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """AdamW (arXiv 1711.05101, algorithm 2), in the order of operations of `AdamW32`.

    Args:
        master, exp_avg, exp_avg_sq: [count] fp32, updated in place
        gradient: [count], any floating type
        low: [count] bf16, receives the new master weights; any pointer unless WRITES_LOW
        decay: lr * weight decay; added to the update, because 1 - decay may round to 1 in fp32
        step_size: lr / (1 - beta1^steps)
        bias_correction2_sqrt: sqrt(1 - beta2^steps)
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * gradient_scale
    m = tl.load(exp_avg + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
    p = tl.load(master + at, mask=inside, other=0.0)
    m = m + (g - m) * (1 - BETA1)
    v = v * BETA2 + g * (1 - BETA2) * g
    # IEEE 754 rounding: on a GPU, Triton's `/` and `sqrt` are approximations.
    update = tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), bias_correction2_sqrt) + EPS)
    p = p - (update + decay * p)
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    tl.store(master + at, p, mask=inside)
    if WRITES_LOW:
        tl.store(low + at, _nearest_bfloat16(p).to(tl.bfloat16), mask=inside)


@triton.jit
def _nearest_bfloat16(x):  # type: ignore[no-untyped-def]
    """Round fp32 numbers to the nearest value of bf16, ties to even; the result is still fp32.

    It uses integers because Triton's interpreter, which runs the tests, truncates to bf16 while a
    GPU rounds.
    """
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
