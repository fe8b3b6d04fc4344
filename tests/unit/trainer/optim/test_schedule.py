"""Learning rates by hand."""

from __future__ import annotations

import pytest

from grpo_trainer.config.cli import CommandLine
from grpo_trainer.config.optimizer import ScheduleName
from grpo_trainer.optim.master_update import Schedule


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
