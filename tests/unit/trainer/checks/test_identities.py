"""Every objective keeps the identities of a loss, and each identity finds a loss that breaks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_core.tree.objectives import ADVANTAGES, LOSSES, PRESETS, Objective, resolved
from grpo_trainer import advantages, losses
from grpo_trainer.checks import identities
from grpo_trainer.checks.identities import broken_identities
from grpo_trainer.losses import LossInputs, LossParts

OPTIONS: Sequence[dict[str, Any]] = [
    {},
    {"entropy_coef": 0.1, "kl_coef": 0.1},
    {"kl_coef": 0.1, "kl_in": "reward", "distill_coef": 0.5},
    {"importance_correction": "mask", "importance_correction_cap": 1.1},
    {"importance_level": "sequence", "importance_correction_level": "sequence"},
    *({"loss": loss} for loss in LOSSES),
    *({"advantage": advantage} for advantage in ADVANTAGES),
    *({"aggregation": aggregation} for aggregation in ("sequence", "token", "constant")),
    *({"kl_coef": 0.1, "kl_estimator": estimator} for estimator in ("k1", "k2", "k3")),
]


@pytest.mark.parametrize("name", PRESETS)
def test_every_objective_keeps_them_with_every_option(name: Any) -> None:
    for options in OPTIONS:
        assert [*broken_identities(resolved(name, options))] == [], options


def mean_over_sequences(tokens: LossInputs, _: Objective) -> Tensor:
    """As of a loss that averages what a micro-batch holds."""
    return -(tokens.weight * tokens.ratio * tokens.advantages).sum(-1).mean()


def mean_over_positions(tokens: LossInputs, _: Objective) -> Tensor:
    """Padding counts."""
    return -(tokens.weight * tokens.ratio * tokens.advantages).mean(-1).sum()


def mean_of_weights(tokens: LossInputs, _: Objective) -> Tensor:
    share = tokens.weight / tokens.weight.sum(-1, keepdim=True)
    return -(share * tokens.ratio * tokens.advantages).sum()


def deviation_of_the_first_group(groups: Sequence[Tensor]) -> list[Tensor]:
    return [(scores - groups[0][0]) / groups[0].std() for scores in groups]


def always_added(values: Any, micro: Any, objective: Objective) -> LossParts:
    """The option's coefficient multiplies what was not computed."""
    loss = losses.policy_loss(LossInputs.of(values, micro, objective), objective)
    bonus = objective.entropy_coef * losses.entropy_bonus(values.entropy, micro.token_weight)
    return LossParts(loss, torch.zeros(()), -bonus)


@pytest.mark.parametrize(
    ("table", "name", "broken", "words"),
    [
        (losses.NAMED_LOSSES, "clip", mean_over_sequences, "micro-batches of one sequence"),
        (losses.NAMED_LOSSES, "clip", mean_over_positions, "with padding"),
        (losses.NAMED_LOSSES, "clip", mean_of_weights, "twice the weights"),
        (
            advantages.NAMED_ADVANTAGES,
            "group_std",
            deviation_of_the_first_group,
            "the order of the groups",
        ),
        (vars(identities), "step_loss", always_added, "whose coefficient is 0"),
    ],
)
def test_each_identity_finds_what_breaks_it(
    table: dict[str, Any],
    name: str,
    broken: Callable[..., Any],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(table, name, broken)
    assert words in "\n".join(broken_identities(Objective()))


@pytest.mark.parametrize("name", ["entropy_bonus", "kl_penalty"])
def test_the_penalty_and_the_bonus_are_part_of_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(losses, name)
    monkeypatch.setattr(losses, name, lambda logp, *rest: right(logp, *rest) / len(logp))
    assert [*broken_identities(Objective(entropy_coef=0.1, kl_coef=0.1))]
