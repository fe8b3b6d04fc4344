"""A resumed trainer of a real adapter with dropout takes exactly the same steps.

It uses fixed batches and no server. `test_rules.py` saves and restores the update rules.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_core.tree.objectives import GRPO
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer.checkpoint.resume import require_fit
from grpo_trainer.checkpoint.store import StateStore, capture, checksum_of_untrained
from grpo_trainer.data.batches import Position
from grpo_trainer.learner import accumulate_gradients
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.model.logprobs import logprobs_of
from grpo_trainer.optim.master_optimizer import build_optimizer
from tests.unit.trainer.groups import collated, group
from tests.unit.trainer.tiny_policy import model_directory


class Trainer:
    """Built like in `start.start_run`, from the same seed."""

    def __init__(self, chosen: TrainerSettings, dtype: torch.dtype) -> None:
        torch.manual_seed(chosen.seed)
        self.policy = TrainedWeights(chosen.model, chosen.lora).load(dtype).eval()
        self.optimizer = build_optimizer(self.policy, chosen)

    def take(self, steps: range) -> list[tuple[float, float]]:
        """(loss, gradient norm) of each step."""
        taken = []
        for step in steps:
            batch = collated(group(), group(scores=[0.0, 1.0 + step]))
            found = accumulate_gradients(self.policy, batch, GRPO, step, optimizer=self.optimizer)
            taken.append((found.loss, self.optimizer.step(step)))
            self.optimizer.write_into_parameters()
            logprobs_of(self.policy, [1, 2, 3])  # a check draws no random number
        return taken


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_resumed_run_is_the_uninterrupted_one(dtype: torch.dtype, tmp_path: Path) -> None:
    chosen = CommandLine(
        model=str(model_directory(tmp_path / "model")),
        mode="lora_only",
        lr=0.01,
        lora_dropout=0.3,
        lora_r=4,
    ).settings()
    alone = Trainer(chosen, dtype)
    store = StateStore(tmp_path / "saved")
    alone.take(range(2))
    position = Position(step=2, batch_id=2, epoch=1)
    frozen = checksum_of_untrained(alone.policy, chosen)
    record = capture(alone.policy, alone.optimizer, chosen, position, "r", frozen)
    store.save(record, alone.optimizer.tensors(list(record.parameters)))
    expected = alone.take(range(2, 4))
    scales = alone.optimizer.loss_scale
    assert (scales is not None) == (dtype is torch.float16)

    torch.manual_seed(99)
    again = Trainer(chosen, dtype)
    saved = store.newest()
    assert saved is not None
    require_fit(saved.record, again.policy, chosen, "here")
    saved.load(again.policy, again.optimizer)
    again.optimizer.write_into_parameters()
    assert again.take(range(2, 4)) == expected
    if scales is not None:
        assert again.optimizer.loss_scale is not None
        assert again.optimizer.loss_scale.record == scales.record
    weights = [trained_parameters(trainer.policy).values() for trainer in (again, alone)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*weights, strict=True))
