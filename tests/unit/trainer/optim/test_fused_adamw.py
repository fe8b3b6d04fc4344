"""The fused step computes AdamW and rounds like torch; Triton interprets its kernel here.

tests/gpu/test_precision.py runs the compiled kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from grpo_trainer.optim.adamw import Adam, StepOptions
from tests.unit.trainer.update_variants import RATE, Model, decay_per_step

if TYPE_CHECKING:
    from grpo_trainer.optim.fused_adamw import FusedAdamW

ULP = 2**-23
MODULES = ("grpo_trainer.optim.fused_adamw",)


@pytest.fixture(scope="module")
def build() -> Iterator[Callable[[], FusedAdamW]]:
    """Triton decides whether to interpret a kernel when the kernel is defined."""
    from triton import knobs

    for name in MODULES:
        sys.modules.pop(name, None)
    with knobs.runtime.scope():
        knobs.runtime.interpret = True
        from grpo_trainer.optim.fused_adamw import FusedAdamW
    yield FusedAdamW
    for name in MODULES:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("size", "weight_decay", "scale"),
    [
        (1025, 0.1, 0.37),
        pytest.param(1024, 0.0, 1.0, marks=pytest.mark.full),
        pytest.param(1, 0.1, 1.0, marks=pytest.mark.full),
    ],
)
def test_it_is_torchs_adamw_within_a_few_ulp_and_stages_the_rounded_master(
    size: int, weight_decay: float, scale: float, build: Callable[[], FusedAdamW]
) -> None:
    torch.manual_seed(0)
    weights = nn.Parameter(torch.randn(size))
    options = StepOptions(0.01, weight_decay, scale, Adam(0.8, 0.95, 1e-3))
    betas, eps = (options.adam.beta1, options.adam.beta2), options.adam.eps
    adamw = torch.optim.AdamW([weights], lr=0.01, weight_decay=weight_decay, betas=betas, eps=eps)
    fused, master = build(), weights.detach().clone()
    state = fused.initial_state(master)
    for _ in range(5):
        gradient = torch.randn(size)
        weights.grad = gradient * scale
        adamw.step()
        low = fused.step(master, gradient, state, options, served=torch.bfloat16)
        assert low is not None
        assert torch.equal(low, master.to(torch.bfloat16))
        theirs = adamw.state[weights]
        assert state.keys() == theirs.keys()
        assert torch.equal(state["step"], theirs["step"])
        torch.testing.assert_close(state["exp_avg_sq"], theirs["exp_avg_sq"], rtol=4 * ULP, atol=0)
        # If the terms of the first moment cancel, the rest is as small as their rounding.
        torch.testing.assert_close(state["exp_avg"], theirs["exp_avg"], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(master, weights.detach(), rtol=4 * ULP, atol=1e-8)


def test_weight_decay_below_the_resolution_of_float32_counts(
    build: Callable[[], FusedAdamW],
) -> None:
    assert decay_per_step(build, 1 << 14) == pytest.approx(RATE, rel=0.05)


def test_memory_beyond_the_end_stays_as_it_is(build: Callable[[], FusedAdamW]) -> None:
    fused, rows = build(), torch.ones(3, 1000)
    state = fused.initial_state(rows[1])
    fused.step(rows[1], torch.ones_like(rows[1]), state, StepOptions(0.01, 0.0), torch.float32)
    assert rows[0].tolist() == rows[2].tolist() == [1.0] * 1000
    assert rows[1].unique().tolist() == pytest.approx([0.99])


def test_a_whole_optimizer_resumes_with_either_step(build: Callable[[], FusedAdamW]) -> None:
    """The fused step also clips, stages and writes; up to rounding it equals the plain step."""
    alone, first, second = Model(), Model(build()), Model(seed=1)
    alone.steps(0, 4)
    first.steps(0, 2)
    assert first.optimizer.unwritten_parameters() == 0
    second.optimizer.load_tensors(second.names, first.optimizer.tensors(first.names))
    first.optimizer.load_tensors(first.names, first.optimizer.tensors(first.names))
    for resumed in (first, second):
        resumed.steps(2, 4)
        held = resumed.optimizer.tensors(resumed.names)
        for path, tensor in alone.optimizer.tensors(alone.names).items():
            torch.testing.assert_close(held[path], tensor, rtol=1e-5, atol=1e-7)
