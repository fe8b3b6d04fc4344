"""Every part of an objective gives numbers worked out by hand, and presets combine the parts."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_core.settings import Mistake
from grpo_core.tree.objective import ObjectiveOptions
from grpo_core.tree.objectives import ADVANTAGES, LOSSES, AggregationName, Objective, resolved
from grpo_trainer.advantages import NAMED_ADVANTAGES, overlong_penalty
from grpo_trainer.data.collate import token_weights
from grpo_trainer.losses import NAMED_LOSSES
from tests.unit.trainer.objectives.test_losses import judged

ROOT = 1.5**0.5


def test_every_name_of_the_options_has_its_function() -> None:
    assert (*NAMED_LOSSES,) == LOSSES
    assert (*NAMED_ADVANTAGES, "maxent") == ADVANTAGES


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("group_std", [[-ROOT, 0, ROOT], [0]]),  # deviation sqrt(2 / 3)
        ("group_mean", [[-1, 0, 1], [0]]),
        ("leave_one_out", [[0 - 1.5, 1 - 1, 2 - 0.5], [0]]),
        # Mean 2, deviation sqrt((4 + 1 + 0 + 9) / 4).
        ("batch_std", [[-2 / 3.5**0.5, -1 / 3.5**0.5, 0], [3 / 3.5**0.5]]),
    ],
)
def test_advantages_by_hand(name: str, expected: list[list[float]]) -> None:
    found = NAMED_ADVANTAGES[name]([torch.tensor([0.0, 1.0, 2.0]), torch.tensor([5.0])])
    assert [group.tolist() for group in found] == [pytest.approx(group) for group in expected]


def test_a_long_completion_is_punished_linearly_within_the_buffer() -> None:
    lost = [overlong_penalty(length, allowed=10, buffer=0.2) for length in (1, 8, 9, 10, 12)]
    assert lost == pytest.approx([0, 0, 0.5, 1, 1])
    assert overlong_penalty(12, allowed=10, buffer=0.0) == 0


@pytest.mark.parametrize(
    ("name", "short", "long"),
    [("sequence", 1 / 2, 1 / 6), ("token", 1 / 4, 1 / 4), ("constant", 1 / 16, 1 / 16)],
)
def test_token_weights_by_hand(name: AggregationName, short: float, long: float) -> None:
    """Sequences of 1 and 3 trained tokens."""
    trained = torch.tensor([[True, False, False], [True, True, True]])
    found = token_weights(trained, name, sequences=2, tokens=4, constant=8)
    torch.testing.assert_close(found, torch.tensor([[short, 0, 0], [long] * 3]))


CISPO, RLOO, DAPO, GSPO = (resolved(name, {}) for name in ("cispo", "rloo", "dapo", "gspo"))


@pytest.mark.parametrize(
    ("objective", "ratio", "advantage", "gradient"),
    [
        (DAPO, 1.25, 2.0, -2.5),
        (DAPO, 1.3, 2.0, 0.0),
        (DAPO, 0.7, -2.0, 0.0),
        (CISPO, 0.1, -2.0, 0.2),
        (CISPO, 4.0, 2.0, -8.0),
        (CISPO, 8.0, 2.0, -10.0),  # the ratio counts as 5
        (RLOO, 0.1, 2.0, -0.2),
        (RLOO, 8.0, 2.0, -6.0),  # truncated to 3
        (resolved("rloo", {"importance_correction": "mask"}), 8.0, 2.0, 0.0),
        (resolved("rloo", {"importance_correction": "mask"}), 2.9, 2.0, -5.8),
        (resolved("rloo", {"importance_correction": "none"}), 8.0, 2.0, -16.0),
        # The minimum is -8 here: truncation bounds what clipping does not.
        (Objective(), 4.0, -2.0, 6.0),
        (Objective(importance_correction="none"), 4.0, -2.0, 8.0),
        (GSPO, 1.0003, 2.0, -2.0006),
        (GSPO, 1.0005, 2.0, 0.0),
    ],
)
def test_gradients_by_hand(
    objective: Objective, ratio: float, advantage: float, gradient: float
) -> None:
    _, ((slope,),), _ = judged([[math.log(ratio) - 3]], [[-3.0]], [advantage], [[1.0]], objective)
    assert slope == pytest.approx(gradient, abs=1e-4)


def test_a_sequence_has_one_ratio_which_is_its_tokens_geometric_mean() -> None:
    """Ratios 2 and 1/2, and an untrained token: the mean is 1, although each is out of range."""
    logp, behaviour = [[math.log(2) - 3, -math.log(2) - 3, 0.0]], [[-3.0, -3.0, -9.0]]
    loss, gradient, sums = judged(logp, behaviour, [2.0], [[1 / 2, 1 / 2, 0.0]], GSPO)
    assert loss == pytest.approx(-2.0)
    assert gradient == [pytest.approx([-1.0, -1.0, 0.0])]
    assert sums.clipped == 0


def test_a_sequence_is_corrected_as_a_whole_for_the_product_of_its_ratios() -> None:
    """2 * 2 is above 3, so both tokens count 3/4; the second sequence's product is 1."""
    objective = resolved("rloo", {"importance_correction_level": "sequence"})
    log2 = math.log(2)
    logp = [[log2 - 3, log2 - 3], [log2 - 3, -log2 - 3]]
    _, gradient, sums = judged(logp, [[-3.0] * 2] * 2, [1.0, 1.0], [[1.0] * 2] * 2, objective)
    assert gradient == [pytest.approx([-1.5, -1.5]), pytest.approx([-2.0, -0.5])]
    assert sums.corrected == 2


def test_options_override_a_preset_and_one_clipping_range_counts_for_both_sides() -> None:
    def chosen(**options: object) -> Objective:
        return ObjectiveOptions.model_validate(options).resolved_objective

    assert chosen() == Objective()
    assert chosen(clip_eps=0.1) == Objective(clip_eps=0.1, clip_eps_high=0.1)
    dapo = chosen(objective="dapo", clip_eps=0.1, aggregation="sequence")
    assert (dapo.clip_eps, dapo.clip_eps_high, dapo.aggregation) == (0.1, 0.28, "sequence")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"aggregation_tokens": 9}, "aggregation_tokens"),
        ({"objective": "rloo", "clip_eps": 0.1}, "clip_eps"),
        ({"objective": "rloo", "clip_eps_high": 0.1}, "clip_eps_high"),
        ({"objective": "cispo", "importance_correction_cap": 2}, "importance_correction_cap"),
        ({"loss": "cispo"}, "importance_correction"),
        ({"importance_level": "sequence"}, "importance_correction"),
        ({"kl_estimator": "k2"}, "kl_estimator"),
        ({"kl_coef": 0.1, "kl_horizon": 5}, "kl_horizon"),
        ({"kl_coef": 0.1, "kl_target": 0.1}, "kl_target"),
        ({"kl_coef": 0.1, "kl_control": "adaptive"}, "kl_target"),
        ({"kl_coef": 0.1, "kl_in": "weights"}, "kl_in"),
        ({"objective": "maxent"}, "maxent_tau"),
        ({"objective": "maxent", "kl_coef": 0.1, "kl_in": "reward", "maxent_tau": 1}, "kl_in"),
        ({"objective": "maxent", "maxent_tau": 1, "aggregation": "token"}, "aggregation"),
        ({"objective": "maxent", "maxent_tau": 1, "maxent_tau_lr": 1}, "maxent_tau_lr"),
        ({"objective": "maxent", "kl_coef": 1, "maxent_target_entropy": 1}, "target_entropy"),
        ({"maxent_tau": 0.1}, "maxent_tau"),
        ({"objective": "maxent", "maxent_tau": 1, "loss": "reinforce"}, "loss"),
        ({"objective": "maxent", "kl_coef": 1, "kl_estimator": "k2"}, "kl_estimator"),
        (
            {"objective": "maxent", "maxent_tau": 1, "maxent_length_normalize_ref": False},
            "length_normalize",
        ),
        ({"loss": "likelihood"}, "importance_correction"),
        ({"objective": "maxent", "kl_coef": 1, "importance_level": "token"}, "importance_level"),
    ],
)
def test_an_option_without_effect_is_a_mistake(options: dict[str, object], field: str) -> None:
    (mistake,) = ObjectiveOptions.model_validate(options).objective_conflicts()
    assert isinstance(mistake, Mistake)
    assert field in str(mistake)
