"""The objective against values worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_trainer.loss import NO_SUMS, LossSums, grpo_loss, loss_sums

EPS = 0.2
LOG_HALF, LOG_3_2 = math.log(0.5), math.log(1.5)


def judged(
    logp: list[list[float]],
    behaviour: list[list[float]],
    advantages: list[float],
    weight: list[list[float]],
) -> tuple[float, list[list[float]], LossSums]:
    """(loss, d loss / d logp, sums)"""
    policy = torch.tensor(logp, requires_grad=True)
    terms = (torch.tensor(behaviour), torch.tensor(advantages), torch.tensor(weight), EPS)
    loss = grpo_loss(policy, *terms)
    loss.backward()
    assert policy.grad is not None
    return float(loss.detach()), policy.grad.tolist(), loss_sums(policy, *terms)


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
        # min(-3.0, -2.4). A maximum there, as in the archived trainer, has loss 2.4 and no
        # gradient: nothing pushes the policy away from a bad token that became likelier.
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_one_token_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    found, ((slope,),), _ = judged([[math.log(ratio) - 1]], [[-1.0]], [advantage], [[1.0]])
    assert (found, slope) == pytest.approx((loss, gradient), abs=1e-5)


def test_masked_tokens_count_for_nothing_even_if_their_ratio_overflows() -> None:
    behaviour = [[-1.0, 1.0, -500.0]]  # ratios 1, exp(-501), exp(500) = inf
    loss, gradient, sums = judged([[-1.0, -500.0, 0.0]], behaviour, [3.0], [[1.0, 0.0, 0.0]])
    assert loss == pytest.approx(-3.0)
    assert gradient == [[-3.0, 0.0, 0.0]]
    assert sums.tokens == 1


def test_weights_and_advantages_belong_to_their_rows() -> None:
    """Two sequences of 1 and 3 tokens, A = +1 and -1, all on policy: the halves cancel."""
    weight = [[1 / 2, 0.0, 0.0], [1 / 6, 1 / 6, 1 / 6]]
    loss, gradient, _ = judged([[0.0] * 3] * 2, [[0.0] * 3] * 2, [1.0, -1.0], weight)
    assert loss == pytest.approx(0.0, abs=1e-7)
    assert gradient[0] == pytest.approx([-1 / 2, 0.0, 0.0])
    assert gradient[1] == pytest.approx([1 / 6] * 3)


def test_sums_by_hand() -> None:
    """Ratios 1.5, 0.5 and 1.0: one above the interval, one below, one inside."""
    logp = [[LOG_3_2 - 1, LOG_HALF - 2, -3.0, 8.0]]
    *_, sums = judged(logp, [[-1.0, -2.0, -3.0, 1.0]], [1.0], [[1.0, 1.0, 1.0, 0.0]])
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
    logp = [[-1.0, -2.0], [-4.0, -4.0], [-8.0, -8.0]]
    *_, sums = judged(logp, logp, [0.5, -0.5, 0.0], [[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    assert (sums.positive_tokens, sums.positive_logp) == (2, -3.0)
    assert (sums.negative_tokens, sums.negative_logp) == (1, -4.0)
    assert sums.tokens == 5


def test_a_batch_without_trained_tokens_has_loss_zero_and_not_nan() -> None:
    loss, _, sums = judged([[0.0, 0.0]], [[1.0, 1.0]], [1.0], [[0.0, 0.0]])
    assert loss == 0.0
    assert sums == NO_SUMS
    means = (sums.mean("ratio"), sums.std("logp"), sums.effective_sample_fraction)
    assert means == (None, None, None)


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_ratio_that_would_overflow_stays_finite_with_its_gradient(advantage: float) -> None:
    """A server logs -9999 for a token that the trainer finds likely."""
    behaviour = [[-9999.0, -1.0]]
    loss, gradient, sums = judged([[-0.1, -1.0]], behaviour, [advantage], [[0.5, 0.5]])
    assert math.isfinite(loss)
    assert math.isfinite(gradient[0][0])
    assert gradient[0][1] == pytest.approx(-0.5 * advantage)
    assert sums.diff_max == pytest.approx(9998.9)
