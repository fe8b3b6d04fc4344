"""Advantages, logprobs and the loss equal values worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from grpo_core.tree.objectives import Objective
from grpo_trainer.advantages import group_std
from grpo_trainer.losses import NO_SUMS, LossSums, loss_sums, policy_loss
from grpo_trainer.model.logprobs import token_values
from tests.unit.trainer.groups import inputs_of, micro_of, values_of

GRPO = Objective()
LOG_HALF, LOG_3_2 = math.log(0.5), math.log(1.5)


def advantages(scores: list[float]) -> list[float]:
    (found,) = group_std([torch.tensor(scores)])
    return found.tolist()


@given(
    st.lists(st.integers(-1000, 1000), min_size=2, max_size=16).filter(lambda s: len(set(s)) > 1)
)
def test_shift_and_scale_of_the_scores_change_nothing(scores: list[int]) -> None:
    plain = advantages([float(score) for score in scores])
    assert sum(plain) == pytest.approx(0, abs=1e-5)
    assert sum(a * a for a in plain) == pytest.approx(len(scores), rel=1e-5)
    assert advantages([7.0 * score - 1000 for score in scores]) == pytest.approx(plain, abs=1e-6)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 32))
def test_equal_scores_give_zeros(score: float, size: int) -> None:
    assert advantages([score] * size) == [0.0] * size


class FixedLogits(nn.Module):
    """A model that gives the logits (0, ln 9) at every position."""

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        assert not use_cache
        return SimpleNamespace(logits=torch.tensor([0.0, math.log(9)]).expand(*input_ids.shape, 2))


def test_each_sequence_is_scored_at_its_own_temperature() -> None:
    """At temperature t the odds are 9^(1/t): 9, 3 and 81 to 1."""
    inputs, targets = torch.zeros(3, 2, dtype=torch.long), torch.tensor([[0, 1]] * 3)
    logp = token_values(FixedLogits(), inputs, targets, torch.tensor([1.0, 2.0, 0.5])).logp
    odds = [9, 3, 81]
    expected = [[1 / (1 + o), o / (1 + o)] for o in odds]
    assert logp.exp().tolist() == [pytest.approx(row, rel=1e-5) for row in expected]


def judged(
    logp: list[list[float]],
    behaviour: list[list[float]],
    advantages: list[float],
    weight: list[list[float]],
    objective: Objective = GRPO,
) -> tuple[float, list[list[float]], LossSums]:
    """(loss, d loss / d logp, sums)"""
    policy = torch.tensor(logp, requires_grad=True)
    columns = (torch.tensor(behaviour), torch.tensor(advantages)[:, None], torch.tensor(weight))
    micro = micro_of(*columns)
    loss = policy_loss(inputs_of(policy, micro, objective), objective)
    loss.backward()
    assert policy.grad is not None
    sums = loss_sums(values_of(policy), micro, objective)
    return float(loss.detach()), policy.grad.tolist(), sums


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # -min(r A, clip(r) A); if the clipped term is smaller the gradient is 0, else -r A.
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),  # min(3.0, 2.4)
        (0.5, 2.0, -1.0, -1.0),  # min(1.0, 1.6): a good token that became rare is made likelier
        (1.0, -2.0, 2.0, 2.0),
        (0.9, -2.0, 1.8, 1.8),
        (0.5, -2.0, 1.6, 0.0),  # min(-1.0, -1.6)
        # min(-3.0, -2.4). A maximum, as in the archived trainer, gives loss 2.4 and no gradient, so
        # a bad token that became likelier stays likely.
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
    """Two sequences of 1 and 3 fresh tokens, A = +1 and -1: the halves cancel."""
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


def test_a_batch_without_trained_tokens_has_loss_zero_and_not_nan() -> None:
    loss, _, sums = judged([[0.0, 0.0]], [[1.0, 1.0]], [1.0], [[0.0, 0.0]])
    assert loss == 0.0
    assert sums == NO_SUMS
    means = (sums.mean("ratio"), sums.std("logp"), sums.effective_sample_fraction)
    assert means == (None, None, None)


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_ratio_that_would_overflow_stays_finite_with_its_gradient(advantage: float) -> None:
    """A server may report -9999 for a token that the trainer finds likely."""
    behaviour = [[-9999.0, -1.0]]
    loss, gradient, sums = judged([[-0.1, -1.0]], behaviour, [advantage], [[0.5, 0.5]])
    assert math.isfinite(loss)
    assert math.isfinite(gradient[0][0])
    assert gradient[0][1] == pytest.approx(-0.5 * advantage)
    assert sums.diff_max == pytest.approx(9998.9)
