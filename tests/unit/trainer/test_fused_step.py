"""The fused step computes AdamW: its cases, in a process in which Triton interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.trainer.interpreted import require_passing

CASES = Path(__file__).with_name("fused_step_cases.py")


def test_the_cases_of_the_fused_step() -> None:
    require_passing(CASES)


def test_the_kernel_and_bitsandbytes_are_imported_for_their_options_alone() -> None:
    probe = """
import sys
import torch
import grpo_trainer.loop
from grpo_trainer.packages import require_packages
from grpo_trainer.settings import TrainerSettings
from grpo_trainer.updates.build import build_update
settings = TrainerSettings(model_name="m", weight_bridge_mode="shared_vllm")
require_packages(settings)
build_update(settings, [torch.zeros(1)])
lazy = {"grpo_trainer.updates.fused_kernel", "bitsandbytes"}
print(sorted(lazy & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


COMPILE = """
import re
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from grpo_trainer.updates.fused_kernel import adamw_kernel

for gradient in ("*fp32", "*bf16"):
    pointers = dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), "*fp32")
    pointers |= {"gradient": gradient, "low": "*bf16"}
    scalars = ("gradient_scale", "decay", "step_size", "bias_correction2_sqrt")
    fixed = {"BETA1": 0.9, "BETA2": 0.999, "EPS": 1e-8, "WRITES_LOW": True, "BLOCK": 1024}
    types = pointers | {"count": "i32"} | dict.fromkeys(scalars, "fp32")
    types |= dict.fromkeys(fixed, "constexpr")
    made = compile(ASTSource(adamw_kernel, types, fixed), target=GPUTarget("cuda", 90, 32))
    print(sorted(set(re.findall(r"(?:sqrt|div)\\.[a-z]+", made.asm["ptx"]))), "cubin" in made.asm)
"""


def test_the_kernel_compiles_for_a_gpu_and_divides_and_roots_exactly(tmp_path: Path) -> None:
    """The interpreter runs Python, and takes more than the compiler does. Needs no GPU."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.splitlines() == ["['div.rn', 'sqrt.rn'] True"] * 2, done.stderr
