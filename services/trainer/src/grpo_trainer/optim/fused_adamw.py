"""AdamW on fp32 masters in one pass over memory (`--fused-step`). Importing it imports Triton.

The kernel writes the rounded weights into the staging copy, not into what is served. A step on
served weights would have to lie inside the pause: it moves 30 bytes per weight there, where the
copy of what is staged moves 4. And a write can be repeated on a server that came back, a step not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_trainer.optim.adamw import (
    BETA1,
    BETA2,
    EPS,
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
    """Masters in fp32. Their state is that of `AdamW32`: a run may go on with either."""

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
                options.lr / (1 - BETA1**steps),
                (1 - BETA2**steps) ** 0.5,
                BETA1=BETA1,
                BETA2=BETA2,
                EPS=EPS,
                WRITES_LOW=low is not None,
                BLOCK=BLOCK,
            )
        return low


# Triton compiles annotations too, and knows `tl.constexpr` alone of ours.
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
        master, exp_avg, exp_avg_sq: [count] fp32, changed in place
        gradient: [count], any floating type
        low: [count] bf16, receives the new master; any pointer unless WRITES_LOW
        decay: lr * weight decay, which is added to the update: 1 - decay may be 1 in fp32
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
    # Rounded as IEEE 754 has it: `/` and `sqrt` of Triton are approximations on a GPU.
    update = tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), bias_correction2_sqrt) + EPS)
    p = p - (update + decay * p)
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    tl.store(master + at, p, mask=inside)
    if WRITES_LOW:
        tl.store(low + at, _nearest_bfloat16(p).to(tl.bfloat16), mask=inside)


@triton.jit
def _nearest_bfloat16(x):  # type: ignore[no-untyped-def]
    """fp32 numbers that bf16 holds exactly: the nearest, ties to the even one.

    In integers, because Triton's interpreter, in which this is tested, cuts off where a GPU rounds.
    """
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
