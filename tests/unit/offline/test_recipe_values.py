"""Keys of a recipe that carry a number mean what TRL 1.16 computes with them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from grpo_offline.errors import RecipeInvalid
from grpo_offline.recipe.objective import objective_options
from grpo_offline.recipe.reading import read_recipe
from grpo_trainer.losses import bounds
from grpo_trainer.objectives import Objective, resolved


def objective_of(*keys: str) -> Objective:
    recipe = read_recipe(["--model_name_or_path", "x", *keys])
    options: dict[str, Any] = objective_options(recipe, "grpo", 0)
    names = {field.name for field in fields(Objective)}
    chosen = {name: value for name, value in options.items() if name in names}
    return resolved(options.get("objective", "grpo"), chosen)


@pytest.mark.parametrize(
    ("keys", "low", "high"),
    [
        # torch.clamp(ratio, 1 - epsilon, 1 + epsilon_high), where epsilon_high defaults to epsilon
        (("--loss_type", "grpo", "--epsilon", "0.1"), 0.9, 1.1),
        (("--loss_type", "dapo", "--epsilon", "0.1", "--epsilon_high", "0.28"), 0.9, 1.28),
        (("--loss_type", "dr_grpo", "--epsilon_high", "0.3"), 0.8, 1.3),
        # torch.clamp(ratio, max=epsilon_high)
        (("--loss_type", "cispo", "--epsilon_high", "5.0"), 0.0, 5.0),
        (("--loss_type", "cispo", "--epsilon_high", "2.5"), 0.0, 2.5),
        (("--loss_type", "cispo"), 0.0, 5.0),
    ],
)
def test_importance_ratios_have_trls_bounds(keys: tuple[str, ...], low: float, high: float) -> None:
    assert bounds(objective_of(*keys)) == (pytest.approx(low), pytest.approx(high))


def test_a_bound_below_one_is_refused_with_cispo() -> None:
    with pytest.raises(RecipeInvalid, match=r"epsilon_high: .* above 1, for example 5.0; got 0.28"):
        objective_of("--loss_type", "cispo", "--epsilon_high", "0.28")


@pytest.mark.parametrize(
    ("mode", "kind", "level"),
    [("token_truncate", "truncate", "token"), ("sequence_mask", "mask", "sequence")],
)
def test_the_cap_of_the_correction_is_trls(mode: str, kind: str, level: str) -> None:
    found = objective_of(
        *("--vllm_importance_sampling_mode", mode, "--vllm_importance_sampling_clip_max", "2.0")
    )
    assert found.importance_correction == kind
    assert found.importance_correction_level == level
    assert found.importance_correction_cap == 2.0
