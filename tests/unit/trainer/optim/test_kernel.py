"""The kernel of the update: run by Triton's interpreter, and compiled for GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from grpo_trainer.optim.rules import BLOCK

pytest.importorskip("triton", reason="Triton has no build for this machine")


@pytest.fixture(scope="module")
def interpreted() -> Any:
    """What `interpreted_kernel` found."""
    command = [sys.executable, "-m", "tests.unit.trainer.optim.interpreted_kernel"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_two_steps_of_the_kernel_are_those_of_the_libraries(interpreted: Any) -> None:
    assert interpreted["difference"] == {"adamw": "", "adamw_8bit": ""}


@pytest.mark.parametrize("option", ["lr", "weight_decay", "gradient_scale"])
def test_a_kernel_that_takes_another_value_of_an_option_is_refused(
    interpreted: Any, option: str
) -> None:
    assert "its weights differ by" in interpreted["refused"][option]


def test_a_kernel_that_cannot_be_built_or_run_is_refused(interpreted: Any) -> None:
    for name, reason in interpreted["failed"].items():
        assert reason.startswith(f"{name}: ")


def test_an_optimizer_with_the_kernel_takes_the_same_steps_and_stages_them(
    interpreted: Any,
) -> None:
    for path, distance in interpreted["furthest"]["adamw"].items():
        # The interpreter cuts bfloat16 off instead of rounding it.
        assert distance <= (2**-5 if path.startswith("parameter") else 1e-6), path
    for path, distance in interpreted["furthest"]["adamw_8bit"].items():
        # A moment at the middle between two codes may fall to either side.
        bound = {"parameter": 2**-5, "state1": 1, "state2": 1}.get(path.partition("/")[0], 5e-3)
        assert distance <= bound, path


def test_bfloat16_masters_are_rounded_to_a_neighbour_and_the_mean_is_right(
    interpreted: Any,
) -> None:
    moved = interpreted["rounded"]
    assert set(moved) == {0.0, 1.0}
    assert sum(moved) / len(moved) == pytest.approx(0.256, abs=0.02)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("is_quantised", [False, True])
def test_it_compiles_for_gpus(capability: int, is_quantised: bool) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from grpo_trainer.optim import kernel

    moments, master = ("*u8", "*bf16") if is_quantised else ("*fp32", "*fp32")
    constants = {
        "block_size": BLOCK,
        "is_quantised": is_quantised,
        "rounds": is_quantised,
        "stages": not is_quantised,
    }
    types = {
        **dict.fromkeys(kernel._adamw.arg_names, "fp32"),
        **dict.fromkeys(("first_scales", "second_scales", "first_map", "second_map"), "*fp32"),
        **{"master": master, "gradient": "*bf16", "staged": "*bf16", "seed": "i32"},
        **{"first": moments, "second": moments},
        **dict.fromkeys(constants, "constexpr"),
    }
    source = ASTSource(kernel._adamw, types, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]
