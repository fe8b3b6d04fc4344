from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_trainer.updates import rounding
from grpo_trainer.updates.rounding import Nearest, Stochastic

CPU = torch.device("cpu")
DRAWS = 1 << 18


def rounded(wide: Tensor, seed: int = 0, step: int = 0) -> Tensor:
    stochastic = Stochastic(seed, CPU)
    stochastic.begin(step)
    target = torch.empty_like(wide, dtype=torch.bfloat16)
    stochastic.round_into(target, wide)
    return target


def neighbours(value: float) -> tuple[float, float]:
    """The bf16 numbers on both sides, the one nearer to 0 first."""
    bits = torch.tensor(value).view(torch.int32) & -65536
    inner, outer = bits.view(torch.float32), (bits + 65536).view(torch.float32)
    return float(inner), float(outer)


@pytest.mark.parametrize(
    "value", [1.0 + 2**-10, -1.0 - 2**-10, 0.3, -0.3, 1e-6, 1.99999, 3e30, 2e-39, 1.0 + 2**-22]
)
def test_the_mean_is_the_number_itself_and_only_its_neighbours_are_hit(value: float) -> None:
    wide = torch.full((DRAWS,), value)
    exact = float(wide[0])
    inner, outer = neighbours(exact)
    drawn = rounded(wide)
    assert set(drawn.float().unique().tolist()) <= {inner, outer}

    share = (exact - inner) / (outer - inner)
    found = float((drawn.float() == outer).double().mean())
    deviation = math.sqrt(share * (1 - share) / DRAWS)
    assert abs(found - share) < 4 * deviation + 1e-12
    assert 0 < share < 1


def test_numbers_that_bf16_holds_stay() -> None:
    exact = torch.randn(4096).to(torch.bfloat16)
    exact[:2] = torch.tensor([0.0, -0.0])
    assert torch.equal(rounded(exact.float()).view(torch.int16), exact.view(torch.int16))


def test_infinities_and_nan_stay_what_they_are() -> None:
    """A NaN with low bits alone would be cut off to an infinity, one with all bits set would be
    carried into -0."""
    bits = torch.tensor([0x7F800000, -0x800000, 0x7F800001, 0x7FFFFFFF, -0x7FFFFF, -1])
    wide = bits.to(torch.int32).view(torch.float32).repeat(1000)
    drawn = rounded(wide).view(1000, -1)
    assert drawn[:, 0].tolist() == [math.inf] * 1000
    assert drawn[:, 1].tolist() == [-math.inf] * 1000
    assert bool(drawn[:, 2:].isnan().all())


def test_beyond_the_largest_number_the_neighbour_is_infinity() -> None:
    below, above = 0x7F7F0000, 0x7F7F4000  # bf16's largest, and a quarter of the way beyond
    wide = torch.tensor([below, above], dtype=torch.int32).view(torch.float32).repeat(4096)
    drawn = rounded(wide).view(-1, 2)
    assert bool(drawn[:, 0].isfinite().all())
    assert float(drawn[:, 1].isinf().double().mean()) == pytest.approx(0.25, abs=0.03)


def test_a_steps_numbers_follow_from_seed_and_step_and_differ_between_them() -> None:
    wide = torch.full((4096,), 1.0 + 2**-8)
    first = rounded(wide, seed=3, step=5)
    assert torch.equal(rounded(wide, seed=3, step=5), first)
    for seed, step in [(3, 6), (4, 5), (5, 3), (35, 0)]:
        agreement = (rounded(wide, seed, step) == first).double().mean()
        assert float(agreement) == pytest.approx(0.5, abs=0.05)  # as between two coins


def test_parameters_of_one_step_get_numbers_of_their_own() -> None:
    stochastic = Stochastic(0, CPU)
    stochastic.begin(0)
    wide = torch.full((4096,), 1.0 + 2**-8)
    one, other = torch.empty(2, 4096, dtype=torch.bfloat16)
    stochastic.round_into(one, wide)
    stochastic.round_into(other, wide)
    assert float((one == other).double().mean()) == pytest.approx(0.5, abs=0.05)


def test_large_tensors_are_rounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.randn(10, 103)
    whole = rounded(wide)
    assert whole.shape == (10, 103)
    monkeypatch.setattr(rounding, "CHUNK_ELEMENTS", 16 * 16)
    parts = rounded(wide)
    for drawn in (whole, parts):
        distance = (drawn.float() - wide).abs()
        assert bool((distance < wide.abs() * 2**-7).all())


def test_the_nearest_is_torchs() -> None:
    wide, target = torch.randn(4096), torch.empty(4096, dtype=torch.bfloat16)
    Nearest().round_into(target, wide)
    assert torch.equal(target, wide.to(torch.bfloat16))
