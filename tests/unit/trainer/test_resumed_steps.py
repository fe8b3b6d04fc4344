"""A resumed trainer takes the same steps to the last bit, with dropout, with real models.

On fixed batches, without a server: the tests compare everything between a batch and the masters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_trainer.adapter import trained_parameters
from grpo_trainer.alignment import logprobs_of
from grpo_trainer.gradients import accumulate_gradients
from grpo_trainer.loop import build_optimizer
from grpo_trainer.modes import Mode
from grpo_trainer.settings import TrainerSettings
from grpo_trainer.state_store import StateStore
from grpo_trainer.trainer_state import Position, capture, require_fit, restore
from grpo_trainer.weight_sync.build import _weights
from tests.unit.trainer.groups import collated, group
from tests.unit.trainer.tiny_policy import model_directory

STEPS = 4
RUNS = [
    (Mode.LORA_ONLY, {"lora_dropout": 0.3, "lora_r": 4}),
    (Mode.NONE, {"optimizer": "adamw_8bit", "master_dtype": "bfloat16"}),
]
"""Weights of both kinds; `test_updates.py` saves and restores every optimizer."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(model_directory(tmp_path_factory.mktemp("tiny") / "model"))


def settings(model: str, mode: str, **changes: Any) -> TrainerSettings:
    return TrainerSettings(
        model_name=model,
        weight_bridge_mode=mode,  # type: ignore[arg-type]
        redis_url="redis://127.0.0.1:6379/0",  # type: ignore[arg-type]
        lr=0.01,
        **changes,
    )


class Trainer:
    """As `loop.begin` makes one, from the same seed."""

    def __init__(self, chosen: TrainerSettings) -> None:
        torch.manual_seed(chosen.seed)
        self.settings = chosen
        self.policy = _weights(chosen).load(torch.bfloat16).eval()
        self.optimizer = build_optimizer(self.policy, chosen)

    def take(self, steps: range) -> list[tuple[float, float]]:
        """(loss, gradient norm) of each."""
        taken = []
        for step in steps:
            batch = collated(group(), group(scores=[0.0, 1.0 + step]))
            loss = accumulate_gradients(self.policy, batch, 0.2, step).loss
            taken.append((loss, self.optimizer.step(step)))
            self.optimizer.write_into_parameters()
            logprobs_of(self.policy, [1, 2, 3])  # a check draws no random number
        return taken

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in trained_parameters(self.policy).values()]


@pytest.mark.parametrize(("mode", "options"), RUNS)
def test_a_resumed_run_is_the_uninterrupted_one(
    mode: Mode, options: dict[str, Any], model: str, tmp_path: Path
) -> None:
    alone = Trainer(settings(model, mode, **options))
    store = StateStore(tmp_path)
    alone.take(range(2))
    position = Position(step=2, batch_id=2, epoch=1)
    store.save(capture(alone.policy, alone.optimizer, alone.settings, position))
    expected = alone.take(range(2, STEPS))

    torch.manual_seed(99)
    again = Trainer(settings(model, mode, **options))
    saved = store.newest()
    assert saved is not None
    require_fit(saved.record, again.policy, again.settings, "here")
    restore(saved.load(), again.policy, again.optimizer)
    again.optimizer.write_into_parameters()
    assert again.take(range(2, STEPS)) == expected
    for mine, theirs in zip(again.weights(), alone.weights(), strict=True):
        assert torch.equal(mine, theirs)
