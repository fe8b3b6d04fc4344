"""Learning rates by hand, and the constants of Adam's rule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from grpo_trainer.config.cli import CommandLine
from grpo_trainer.config.optimizer import ScheduleName
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.optim.rules import Adam
from grpo_trainer.optim.schedule import Schedule, constant


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


def test_adams_constants_by_hand() -> None:
    """Gradients 1 and -3 with both betas 0.5: the second moments' root is sqrt(19 / 3)."""
    weight = nn.Parameter(torch.zeros(1))
    adam = Adam(beta1=0.5, beta2=0.5, eps=1.0)
    optimizer = MasterOptimizer([weight], constant(1.0), 0.0, 1e9, adam=adam)
    found = []
    for step, gradient in enumerate((1.0, -3.0)):
        (gradient * weight).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step(step)
        found.append(float(optimizer.masters[0]))
    first, second = -1 / (1 + 1), (1.25 / 0.75) / ((4.75 / 0.75) ** 0.5 + 1)
    assert found == pytest.approx([first, first + second], abs=1e-6)
