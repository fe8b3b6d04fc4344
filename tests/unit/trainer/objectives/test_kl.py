"""KL estimates, the penalty and its coefficient equal values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_core.tree.objectives import KlControlName, KlEstimatorName
from grpo_trainer.coefficients import KlCoefficient
from grpo_trainer.losses import entropy_bonus, kl_penalty, kl_terms

LOG2 = math.log(2)


@pytest.mark.parametrize(
    ("estimator", "twice", "half", "slope"),
    [
        ("k1", LOG2, -LOG2, 1.0),
        ("k2", LOG2**2 / 2, LOG2**2 / 2, LOG2),
        ("k3", 1 / 2 - 1 + LOG2, 2 - 1 - LOG2, 1 - 1 / 2),
    ],
)
def test_estimates_by_hand(
    estimator: KlEstimatorName, twice: float, half: float, slope: float
) -> None:
    """Tokens that are twice and half as likely as under the reference; d estimate / d log p."""
    logp = torch.tensor([LOG2 - 3, -LOG2 - 3], requires_grad=True)
    found = kl_terms(logp, torch.tensor([-3.0, -3.0]), estimator)
    assert found.tolist() == pytest.approx([twice, half], abs=1e-6)
    (gradient,) = torch.autograd.grad(found.sum(), logp)
    assert float(gradient[0]) == pytest.approx(slope, abs=1e-6)


def test_penalty_and_bonus_are_weighted_like_the_loss() -> None:
    weight = torch.tensor([[0.25, 0.0], [0.5, 0.25]])
    logp = torch.tensor([[-1.0, 99.0], [-1.0, -3.0]])
    penalty = kl_penalty(logp, torch.full((2, 2), -2.0), weight, "k1")
    assert float(penalty) == pytest.approx(0.25 + 0.5 - 0.25)
    assert float(entropy_bonus(torch.tensor([[4.0, 9.0], [1.0, 2.0]]), weight)) == 2.0


@pytest.mark.parametrize(
    ("control", "divergence", "sequences", "value"),
    [
        ("fixed", 9.0, 128, 0.05),
        ("adaptive", 0.2, 128, 0.050128),  # twice the target, 128 of 10,000 sequences
        ("adaptive", 0.11, 128, 0.05 * (1 + 0.0128 * 0.1)),
        ("adaptive", 0.0, 128, 0.05 * (1 - 0.0128 * 0.2)),
        ("adaptive", 0.0, 90_000, 0.05 * (1 - 0.2)),  # at most a fifth
    ],
)
def test_a_coefficient_follows_the_divergence(
    control: KlControlName, divergence: float, sequences: int, value: float
) -> None:
    coefficient = KlCoefficient(control, initial=0.05, target=0.1, horizon=10_000)
    coefficient.observe(divergence, sequences)
    assert coefficient.value == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize(
    ("control", "saved", "value"),
    [("adaptive", 2.0, 2.0), ("adaptive", None, 0.5), ("fixed", 2.0, 0.5)],
)
def test_a_resumed_run_goes_on_with_its_coefficient_unless_it_is_fixed(
    control: KlControlName, saved: float | None, value: float
) -> None:
    coefficient = KlCoefficient(control, initial=0.5, target=0.1, horizon=100)
    coefficient.resume(saved)
    assert coefficient.value == value


@pytest.mark.parametrize(
    ("control", "initial", "saved"),
    [("fixed", 0.1, None), ("adaptive", 0.0, None), ("adaptive", 0.1, 0.1 * 1.02)],
)
def test_only_a_coefficient_that_moves_is_saved(
    control: KlControlName, initial: float, saved: float | None
) -> None:
    coefficient = KlCoefficient(control, initial, target=0.1, horizon=10)
    coefficient.observe(9.0, sequences=1)
    assert coefficient.to_save == (saved and pytest.approx(saved))
