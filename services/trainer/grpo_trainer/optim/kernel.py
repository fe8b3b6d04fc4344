"""AdamW on a bucket as one Triton kernel: reads each number once, and writes each once.

Torch's and bitsandbytes' kernels update weights alone. Around them weight decay, rounding and the
staging copy are passes of their own over all weights, and on a GPU a pass costs as much as an
update. The arithmetic is that of `rules`, up to the rounding of float32.

This file needs Triton, which comes with torch's builds for CUDA.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import subprocess
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import TritonError

from grpo_trainer.optim.master_update import BucketPart, MasterUpdate, StochasticRounding
from grpo_trainer.optim.rules import BLOCK, EXP_AVG, EXP_AVG_SQ, StepOptions, UpdateRule

_QUANTISED = ("absmax1", "absmax2", "qmap1", "qmap2")
_PROBE_WEIGHTS, _PROBE_TOLERANCE = 1 << 12, 2e-5
"""Two steps move a weight by up to 2e-3. Some 8-bit moments differ by one code."""
_BFLOAT16_STEPS = 2 * 2**-7
"""Two roundings to a neighbour, relative to the number."""
_FAILURES = (RuntimeError, OSError, AssertionError, subprocess.SubprocessError, TritonError)
"""Of Triton, the C compiler that it calls, its cache directory, and the driver."""


@triton.jit
def _adamw(
    master,
    gradient,
    staged,
    first,
    second,
    first_scales,
    second_scales,
    first_map,
    second_map,
    lr,
    decay,
    scale,
    beta1,
    beta2,
    eps,
    correction1,
    correction2,
    seed,
    block_size: tl.constexpr,
    is_quantised: tl.constexpr,
    rounds: tl.constexpr,
    stages: tl.constexpr,
):
    """One program updates one block of weights.

    Args:
        first, second: moments in float32, or 8-bit codes
        first_scales, second_scales: the largest moment of each block
        first_map, second_map: the values of the codes, in order
        correction1, correction2: 1 - beta1^t, and the root of 1 - beta2^t
        rounds: to bfloat16 at random
    """
    block = tl.program_id(0)
    at = block.to(tl.int64) * block_size + tl.arange(0, block_size)
    g = tl.load(gradient + at).to(tl.float32) * scale
    m = tl.load(first + at)
    v = tl.load(second + at)
    if is_quantised:
        m = tl.load(first_map + m.to(tl.int32)) * tl.load(first_scales + block)
        v = tl.load(second_map + v.to(tl.int32)) * tl.load(second_scales + block)
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * g * g
    w = tl.load(master + at).to(tl.float32)
    # Both at once: a decay below float32's resolution would not change a factor of w.
    w = w - (lr / correction1 * m / (tl.sqrt(v) / correction2 + eps) + decay * w)
    if is_quantised:
        m = _codes(m, tl.max(tl.abs(m)), first_scales + block, first_map)
        v = _codes(v, tl.max(v), second_scales + block, second_map)
    tl.store(first + at, m)
    tl.store(second + at, v)
    if rounds:
        # See `master_update`: the lower 16 bits are cut off after a random number was added.
        noise = (tl.randint(seed, at.to(tl.int32)) & 0xFFFF).to(tl.int32)
        bits = w.to(tl.int32, bitcast=True) + noise
        w = tl.where(w == w, (bits & -65536).to(tl.float32, bitcast=True), w)
    tl.store(master + at, w.to(master.dtype.element_ty))
    if stages:
        tl.store(staged + at, w.to(staged.dtype.element_ty))


@triton.jit
def _codes(values, largest, scale, code_values):
    """The code whose value is nearest to each value, and the block's scale, which is stored."""
    tl.store(scale, largest)
    relative = tl.where(largest > 0, values / largest, 0.0)
    code = tl.zeros_like(relative).to(tl.int32)
    for power in tl.static_range(8):
        higher = code + (128 >> power)
        middle = (tl.load(code_values + higher - 1) + tl.load(code_values + higher)) / 2
        code = tl.where(relative > middle, higher, code)
    return code.to(tl.uint8)


def update(part: BucketPart, step: int, options: StepOptions, seed: int | None) -> None:
    """Take one step on a part of a bucket, and stage the result.

    Args:
        part: its number of weights is a multiple of `BLOCK`
        step: counted from 1
        seed: of random rounding to bfloat16; None: to the nearest
    """
    state, adam = part.state, options.adam
    is_quantised = "qmap1" in state
    names = ("state1", "state2") if "state1" in state else (EXP_AVG, EXP_AVG_SQ)
    unused: Tensor = part.master
    extra = [state[kind] if is_quantised else unused for kind in _QUANTISED]
    _adamw[(part.master.numel() // BLOCK,)](
        part.master,
        part.gradient,
        unused if part.staged is None else part.staged,
        *(state[name] for name in names),
        *extra,
        options.lr,
        options.lr * options.weight_decay,
        options.gradient_scale,
        adam.beta1,
        adam.beta2,
        adam.eps,
        1 - adam.beta1**step,
        (1 - adam.beta2**step) ** 0.5,
        0 if seed is None else seed,
        block_size=BLOCK,
        is_quantised=is_quantised,
        rounds=seed is not None,
        stages=part.staged is not None,
    )


def difference(rule: UpdateRule, device: torch.device) -> str:
    """How far two steps of each variant of the kernel end from those of the rule; empty if they
    agree."""
    kernel = MasterUpdate(rule, kernel=update)
    try:
        expected, _ = _stepped(MasterUpdate(rule), device)
        found, staged = _stepped(kernel, device)
        rounded, _ = _stepped(kernel, device, StochasticRounding(0, device))
    except _FAILURES as error:
        return f"{type(error).__name__}: {error}"
    off = float((found - expected).abs().mean())
    if not off < _PROBE_TOLERANCE:
        return f"its weights differ by {off:.2g} on average from those of {type(rule).__name__}"
    for kind, weights in (("staged", staged), ("rounded", rounded)):
        far = float(((weights - found).abs() - _BFLOAT16_STEPS * found.abs()).max())
        if not far < _PROBE_TOLERANCE:
            return f"a weight that it {kind} is {far:.2g} too far from its value in float32"
    return ""


def _stepped(
    kind: MasterUpdate, device: torch.device, rounding: StochasticRounding | None = None
) -> tuple[Tensor, Tensor]:
    """Master weights after two steps, and their staging copy in bfloat16; as float32. Args:
    rounding: the masters are in bfloat16"""
    drawn = torch.Generator(device).manual_seed(0)
    master = torch.randn(_PROBE_WEIGHTS, device=device, generator=drawn).bfloat16()
    master = master if rounding else master.float()
    staged = torch.empty_like(master, dtype=torch.bfloat16)
    state = kind.rule.initial_state(master, kind.rule.kind_of(master))
    one = replace(kind, rounding=rounding)
    for step in (1, 2):
        one.begin_step(step)
        gradient = torch.randn(_PROBE_WEIGHTS, device=device, generator=drawn)
        one.step(BucketPart(master, gradient, state, staged), step, StepOptions(1e-3, 0.1, 0.5))
    return master.float(), staged.float()
