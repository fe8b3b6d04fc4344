"""The objective against values worked by hand."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch

from grpo_trainer.loss import NO_SUMS, grpo_loss, loss_sums

EPS = 0.2
LOG_HALF, LOG_3_2 = math.log(0.5), math.log(1.5)


def one_token(ratio: float, advantage: float) -> tuple[float, float]:
    """(loss, d loss / d logp) of a single token of weight 1."""
    behaviour = torch.tensor([[-1.0]])
    logp = torch.tensor([[-1.0 + math.log(ratio)]], requires_grad=True)
    loss = grpo_loss(logp, behaviour, torch.tensor([advantage]), torch.ones(1, 1), EPS)
    loss.backward()
    assert logp.grad is not None
    return float(loss.detach()), float(logp.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # -min(r A, clip(r) A); where the clipped term is smaller the gradient is 0, else -r A.
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),  # min(3.0, 2.4)
        (0.5, 2.0, -1.0, -1.0),  # min(1.0, 1.6): a good token that became rare is pulled back
        (1.0, -2.0, 2.0, 2.0),
        (0.9, -2.0, 1.8, 1.8),
        (0.5, -2.0, 1.6, 0.0),  # min(-1.0, -1.6)
    ],
)
def test_one_token_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert one_token(ratio, advantage) == (
        pytest.approx(loss, abs=1e-5),
        pytest.approx(gradient, abs=1e-5),
    )


def test_a_bad_token_that_became_likelier_keeps_its_gradient() -> None:
    """A < 0 and r = 1.5: min(-3.0, -2.4) = -3.0.

    The archived trainer took the maximum there: loss 2.4 and no gradient, so that the policy was
    never pushed away from a bad token once it had drifted towards it.
    """
    assert one_token(1.5, -2.0) == (pytest.approx(3.0, abs=1e-5), pytest.approx(3.0, abs=1e-5))


def test_masked_tokens_count_for_nothing_even_where_their_ratio_overflows() -> None:
    logp = torch.tensor([[-1.0, -500.0, 0.0]], requires_grad=True)
    behaviour = torch.tensor([[-1.0, 1.0, -500.0]])  # ratios 1, exp(-501), exp(500) = inf
    weight = torch.tensor([[1.0, 0.0, 0.0]])
    terms = (behaviour, torch.tensor([3.0]), weight, EPS)
    loss, sums = grpo_loss(logp, *terms), loss_sums(logp, *terms)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-3.0)
    assert logp.grad is not None
    assert logp.grad.tolist() == [[-3.0, 0.0, 0.0]]
    assert sums.tokens == 1


def test_unequal_lengths_weigh_each_sequence_the_same() -> None:
    """Two sequences of 1 and 3 tokens, A = +1 and -1, all on policy: the halves cancel."""
    logp = torch.zeros(2, 3, requires_grad=True)
    weight = torch.tensor([[1 / 2, 0.0, 0.0], [1 / 6, 1 / 6, 1 / 6]])
    loss = grpo_loss(logp, torch.zeros(2, 3), torch.tensor([1.0, -1.0]), weight, EPS)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-7)
    assert logp.grad is not None
    assert logp.grad[0].tolist() == pytest.approx([-1 / 2, 0.0, 0.0])
    assert logp.grad[1].tolist() == pytest.approx([1 / 6] * 3)


def test_sums_by_hand() -> None:
    """Ratios 1.5, 0.5 and 1.0: one above the interval, one below, one inside."""
    behaviour = torch.tensor([[-1.0, -2.0, -3.0, 1.0]])
    logp = behaviour + torch.tensor([[LOG_3_2, LOG_HALF, 0.0, 7.0]])
    weight = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    sums = loss_sums(logp, behaviour, torch.tensor([1.0]), weight, EPS)
    assert sums.mean("ratio") == pytest.approx(1.0, abs=1e-6)
    assert sums.ratio_max == pytest.approx(1.5, abs=1e-6)
    assert sums.effective_sample_fraction == pytest.approx(9 / (3 * 3.5), abs=1e-6)
    assert sums.mean("clipped") == pytest.approx(2 / 3)
    assert sums.mean("behaviour_logp") == pytest.approx(-2.0)
    assert sums.std("behaviour_logp") == pytest.approx(1.0)  # of -1, -2, -3, divided by 2
    assert sums.mean("diff") == pytest.approx((LOG_3_2 + LOG_HALF) / 3, abs=1e-6)
    assert sums.mean("diff_abs") == pytest.approx((LOG_3_2 - LOG_HALF) / 3, abs=1e-6)
    assert sums.diff_max == pytest.approx(-LOG_HALF, abs=1e-6)
    # r - 1 - log r: 0.5 - log 1.5 and -0.5 - log 0.5
    assert sums.mean("kl_k3") == pytest.approx((-LOG_3_2 - LOG_HALF) / 3, abs=1e-6)


def test_tokens_of_good_and_of_bad_sequences_are_told_apart() -> None:
    logp = torch.tensor([[-1.0, -2.0], [-4.0, -4.0], [-8.0, -8.0]])
    weight = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    sums = loss_sums(logp, logp, torch.tensor([0.5, -0.5, 0.0]), weight, EPS)
    assert (sums.positive_tokens, sums.positive_logp) == (2, -3.0)
    assert (sums.negative_tokens, sums.negative_logp) == (1, -4.0)
    assert sums.tokens == 5


def test_the_sums_of_parts_are_the_sums_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    logp = -3 * torch.rand(6, 9, generator=generator)
    behaviour = logp + 0.3 * torch.randn(6, 9, generator=generator)
    advantages = torch.randn(6, generator=generator)
    weight = (torch.rand(6, 9, generator=generator) > 0.3).float()
    whole = loss_sums(logp, behaviour, advantages, weight, EPS)
    total = NO_SUMS
    for rows in ([0], [1, 2, 3], [4, 5]):
        total += loss_sums(logp[rows], behaviour[rows], advantages[rows], weight[rows], EPS)
    assert asdict(total) == pytest.approx(asdict(whole), rel=1e-12)
    chosen = logp[weight > 0].double()
    assert total.std("logp") == pytest.approx(float(chosen.std()), rel=1e-9)


def test_nothing_to_train_on_is_a_zero_loss_not_nan() -> None:
    logp = torch.zeros(1, 2, requires_grad=True)
    terms = (torch.ones(1, 2), torch.ones(1), torch.zeros(1, 2), EPS)
    loss, sums = grpo_loss(logp, *terms), loss_sums(logp, *terms)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert sums == NO_SUMS
    assert sums.mean("ratio") is None
    assert sums.std("logp") is None
    assert sums.effective_sample_fraction is None


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_ratio_that_would_overflow_stays_finite_with_its_gradient(advantage: float) -> None:
    """A server that logs -9999 for a token that the trainer finds likely."""
    behaviour = torch.tensor([[-9999.0, -1.0]])
    logp = torch.tensor([[-0.1, -1.0]], requires_grad=True)
    weight = torch.full((1, 2), 0.5)
    terms = (behaviour, torch.tensor([advantage]), weight, EPS)
    loss, sums = grpo_loss(logp, *terms), loss_sums(logp, *terms)
    loss.backward()
    assert math.isfinite(float(loss.detach()))
    assert logp.grad is not None
    assert bool(logp.grad.isfinite().all())
    assert float(logp.grad[0, 1]) == pytest.approx(-0.5 * advantage)
    assert sums.diff_max == pytest.approx(9998.9)
