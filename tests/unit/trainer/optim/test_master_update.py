"""Stochastic rounding to bf16: neighbours only, correct mean, numbers that follow the seed; and
learning rates by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from grpo_core.tree.optim import ScheduleName
from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer.optim import master_update
from grpo_trainer.optim.master_update import StochasticRounding
from grpo_trainer.optim.schedule import Schedule

DRAWS = 1 << 18
DEVIATION = math.sqrt(math.log(2e12) / (2 * DRAWS))
"""Bound on a share's distance from its expectation; exceeded with probability below 1e-12
(Hoeffding)."""
BETWEEN = 1.0 + 2**-8
"""Halfway between two bf16 numbers, so either is equally likely."""


def rounded(wide: Tensor, seed: int = 0, step: int = 0, part: int = 0) -> Tensor:
    stochastic = StochasticRounding(seed, torch.device("cpu"), part)
    stochastic.begin_step(step)
    target = torch.empty_like(wide, dtype=torch.bfloat16)
    stochastic.round_into(target, wide)
    return target


@given(st.integers(-(2**31), 2**31 - 1))
@example(0x7F7F4000)  # beyond bf16's largest number: the neighbour is infinity
@example(0x7F800000)  # infinity
@example(0x7F800001)  # a NaN that becomes infinity if its lower bits are cut off
@example(-1)  # a NaN that becomes 0 if its bits overflow
@example(-0x80000000)  # -0
@example(0x00008000)  # a subnormal number
def test_a_number_is_rounded_to_its_neighbours_and_the_mean_is_the_number(bits: int) -> None:
    """bf16 is the upper half of the bits; the lower half is the distance to the outer neighbour."""
    wide = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    drawn = rounded(wide.expand(DRAWS).contiguous())
    if wide.isnan():
        assert bool(drawn.isnan().all())
        return
    inner = torch.tensor(bits & -65536, dtype=torch.int32).view(torch.float32).to(torch.bfloat16)
    is_inner = drawn.view(torch.int16) == inner.view(torch.int16)
    is_outer = drawn.view(torch.int16) == inner.view(torch.int16) + 1
    assert bool((is_inner | is_outer).all())
    assert abs(float(is_outer.double().mean()) - (bits & 65535) / 65536) < DEVIATION
    if bits & 65535 == 0:
        assert bool(is_inner.all())


def test_random_numbers_follow_from_seed_and_step_and_differ_otherwise() -> None:
    wide = torch.full((4096,), BETWEEN)
    first = rounded(wide, seed=3, step=5)
    assert torch.equal(rounded(wide, seed=3, step=5), first)
    for seed, step in [(3, 6), (4, 5), (5, 3), (35, 0)]:
        assert is_independent(rounded(wide, seed, step), first)
    assert is_independent(rounded(wide, seed=3, step=5, part=1), first)


def is_independent(one: Tensor, other: Tensor) -> bool:
    """Independent numbers, like two coins, agree half of the time."""
    return bool(float((one == other).double().mean()) == pytest.approx(0.5, abs=0.05))


def test_tensors_of_one_step_and_parts_of_a_tensor_have_numbers_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stochastic = StochasticRounding(0, torch.device("cpu"))
    stochastic.begin_step(0)
    wide = torch.full((2, 4096), BETWEEN)
    one, other = torch.empty(2, 2, 4096, dtype=torch.bfloat16)
    stochastic.round_into(one, wide)
    monkeypatch.setattr(master_update, "CHUNK_ELEMENTS", 4096)
    stochastic.round_into(other, wide)
    assert is_independent(one, other)
    assert is_independent(other[0], other[1])
    assert set(other.unique().tolist()) == {1.0, 1.0 + 2**-7}


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("constant", [1, 2, 2, 2, 2, 2]),
        ("linear", [1, 2, 2, 1.5, 1, 0.5]),
        ("cosine", [1, 2, 2, 1 + 0.5**0.5, 1, 1 - 0.5**0.5]),
    ],
)
def test_two_steps_of_warm_up_and_four_of_each_schedule(
    name: ScheduleName, rates: list[float]
) -> None:
    schedule = Schedule(name, peak=2.0, warmup_steps=2, steps=6)
    assert [schedule(step) for step in range(6)] == pytest.approx(rates)


def test_a_warm_up_ratio_is_a_fraction_of_all_steps() -> None:
    options = {"model": "m", "steps": 25, "warmup_ratio": 0.1, "lr_schedule": "cosine"}
    settings = CommandLine.model_validate(options).settings()
    assert Schedule.of(settings, 25) == Schedule("cosine", settings.lr, warmup_steps=3, steps=25)
