"""Runs the kernel of the update with Triton's interpreter on a CPU, and prints the results as JSON.
Triton reads TRITON_INTERPRET when it is first imported, so this is a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import torch

from grpo_trainer.optim import kernel
from grpo_trainer.optim.master_update import BucketPart
from grpo_trainer.optim.rules import BLOCK, AdamW8bit, AdamW32, StepOptions, UpdateRule
from tests.unit.trainer.update_variants import CPU, VARIANTS, Model

RULES: dict[str, UpdateRule] = {"adamw": AdamW32(), "adamw_8bit": AdamW8bit(CPU)}
WRONG = {"lr": 2e-3, "weight_decay": 30.0, "gradient_scale": -0.5}
ERRORS = (
    OSError("the cache cannot be written"),
    AssertionError("libcuda.so cannot found!"),
    subprocess.CalledProcessError(1, "gcc"),
)
right = kernel.update
kernel._PROBE_WEIGHTS = 4 * BLOCK  # a block takes the interpreter 50 ms


def refused(name: str, value: float) -> str:
    """Why a kernel that takes another value of an option is refused."""

    def wrong(part: BucketPart, step: int, options: StepOptions, seed: int | None) -> None:
        right(part, step, replace(options, **{name: value}), seed)

    kernel.update = wrong
    try:
        return kernel.difference(RULES["adamw"], CPU)
    finally:
        kernel.update = right


def failed(error: Exception) -> str:
    """Why a kernel that fails is refused."""

    def fail(*_: object) -> None:
        raise error

    kernel.update = fail
    try:
        return kernel.difference(RULES["adamw"], CPU)
    finally:
        kernel.update = right


def furthest(variant: str) -> dict[str, float]:
    """Distances of an optimizer's tensors with the kernel from those without, after three steps of
    one or two passes; of three parameters one has no gradient."""
    models = Model(VARIANTS[variant]()), Model(VARIANTS[variant]())
    models[1].optimizer.update.kernel = right
    for step in range(3):
        for model in models:
            model.step(step, 1 + step % 2)
            model.optimizer.write_into_parameters()
    plain, fused = (model.tensors() for model in models)
    assert plain.keys() == fused.keys()
    pairs = ((path, plain[path].float(), fused[path].float()) for path in plain)
    return {path: float((ours - theirs).abs().max()) for path, ours, theirs in pairs}


def rounded() -> list[float]:
    """bfloat16 weights of 1 after a step of 1e-3 down, in units of the distance to the next
    number, 2^-8."""
    count = 8 * BLOCK
    master, gradient = torch.ones(count, dtype=torch.bfloat16), torch.ones(count)
    part = BucketPart(master, gradient, RULES["adamw"].initial_state(master, None))
    right(part, 1, StepOptions(1e-3, 0.0), 7)
    found: list[float] = ((1 - master.float()) * 256).tolist()
    return found


def main() -> None:
    found: dict[str, Any] = {
        "difference": {name: kernel.difference(rule, CPU) for name, rule in RULES.items()},
        "refused": {name: refused(name, value) for name, value in WRONG.items()},
        "failed": {type(error).__name__: failed(error) for error in ERRORS},
        "furthest": {variant: furthest(variant) for variant in RULES},
        "rounded": rounded(),
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
