"""The weights of MaxEnt-GRPO equal values worked out by hand, and tau follows their entropy."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_core.tree.objectives import Objective
from grpo_trainer.advantages import completion_weights, entropy_of, improved
from grpo_trainer.coefficients import Tau

SCORES = torch.tensor([1.0, 0.0, 0.0, 0.0])
REFERENCE = torch.tensor([-0.5, -0.4, -1.0, -2.0])


def test_weights_by_hand() -> None:
    objective = Objective(advantage="maxent", maxent_tau=0.2)
    found = completion_weights(SCORES, REFERENCE, objective, beta=0.1)
    assert found.tolist() == pytest.approx([0.918511, 0.033878, 0.027737, 0.019874], abs=1e-6)
    assert entropy_of(found) == pytest.approx(0.37006, abs=1e-5)


def test_q_is_a_softmax_with_a_floor() -> None:
    soft = math.e**2 / (math.e**2 + 3)
    assert improved(SCORES, 0.5, 0.1).tolist() == pytest.approx(
        [0.1 + 0.6 * soft, *[0.1 + 0.6 * (1 - soft) / 3] * 3]
    )
    far = improved(torch.tensor([1e6, 0.0]), 1.0, 1e-6)
    assert far.log().isfinite().all()


def test_without_beta_the_reference_does_not_count_and_without_tau_it_decides_alone() -> None:
    objective = Objective(maxent_tau=1.0, maxent_q_epsilon=1e-12)
    alone = completion_weights(SCORES, REFERENCE, objective, beta=0.0)
    assert alone.tolist() == pytest.approx(SCORES.softmax(0).tolist())
    equal = completion_weights(torch.zeros(4), REFERENCE, Objective(), beta=1e6)
    assert equal.tolist() == pytest.approx(REFERENCE.softmax(0).tolist(), abs=1e-5)


def test_entropy_of_certain_and_of_equal_weights() -> None:
    assert entropy_of(torch.tensor([1.0, 0.0])) == 0.0
    assert entropy_of(torch.full((4,), 0.25)) == pytest.approx(math.log(4))


def test_tau_follows_the_average_entropy_after_the_warm_up() -> None:
    tau = Tau(initial=0.5, target=1.0, rate=0.1, warmup_steps=1)
    tau.observe(0.4, step=0)
    assert tau.value == 0.5
    tau.observe(0.9, step=1)  # average 0.9 * 0.4 + 0.1 * 0.9
    assert tau.value == pytest.approx(0.5 * math.exp(0.1 * (1 - 0.45)))
    resumed = Tau(initial=0.5, target=1.0, rate=0.1)
    resumed.resume(tau.to_save)
    for one in (tau, resumed):
        one.observe(2.0, step=2)
    assert resumed.value == tau.value


@pytest.mark.parametrize(
    ("initial", "entropy", "bound"),
    [(0.5, 1e9, 0.001), (0.5, -1e9, 10.0), (1e-4, 1e9, 1e-4), (50.0, -1e9, 50.0)],
)
def test_tau_is_bounded(initial: float, entropy: float, bound: float) -> None:
    tau = Tau(initial, target=1.0, rate=1e-7)
    for step in range(20):
        tau.observe(entropy, step)
    assert tau.value == bound


def test_without_a_target_tau_stays_and_is_not_saved() -> None:
    tau = Tau(initial=0.5)
    tau.observe(9.0, step=0)
    tau.resume((2.0, 1.0))
    assert (tau.value, tau.to_save) == (0.5, None)
