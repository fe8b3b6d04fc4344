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
from grpo_trainer.checkpoint.parts import StatePart
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
    """Built like in `start.start_run`, from the same seed.

    Args: of_adapter: its data type; None: the model's
    """

    def __init__(
        self, chosen: TrainerSettings, dtype: torch.dtype, of_adapter: torch.dtype | None = None
    ) -> None:
        torch.manual_seed(chosen.seed)
        self.chosen = chosen
        self.policy = TrainedWeights(chosen.model, chosen.lora).load(dtype).eval()
        for parameter in trained_parameters(self.policy).values():
            parameter.data = parameter.detach().to(of_adapter or dtype)
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

    def save(self, store: StateStore) -> None:
        position = Position(step=2, batch_id=2, epoch=1)
        frozen = checksum_of_untrained(self.policy, self.chosen)
        record = capture(self.policy, self.optimizer, self.chosen, position, "r", frozen)
        tensors = self.optimizer.tensors(list(record.parameters))
        store.save(record, StatePart.copied(tensors, leads=True))

    def resume(self, store: StateStore) -> None:
        saved = store.newest()
        assert saved is not None
        require_fit(saved.record, self.policy, self.chosen, "here")
        saved.load(self.policy, self.optimizer)
        self.optimizer.write_into_parameters()


@pytest.fixture
def chosen(tmp_path: Path) -> TrainerSettings:
    return CommandLine(
        model=str(model_directory(tmp_path / "model")),
        mode="lora_only",
        lr=0.01,
        lora_dropout=0.3,
        lora_r=4,
    ).settings()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_resumed_run_is_the_uninterrupted_one(
    dtype: torch.dtype, chosen: TrainerSettings, tmp_path: Path
) -> None:
    alone = Trainer(chosen, dtype)
    store = StateStore(tmp_path / "saved")
    alone.take(range(2))
    alone.save(store)
    expected = alone.take(range(2, 4))
    scales = alone.optimizer.loss_scale
    assert (scales is not None) == (dtype is torch.float16)

    torch.manual_seed(99)
    again = Trainer(chosen, dtype)
    again.resume(store)
    assert again.take(range(2, 4)) == expected
    if scales is not None:
        assert again.optimizer.loss_scale is not None
        assert again.optimizer.loss_scale.record == scales.record
    weights = [trained_parameters(trainer.policy).values() for trainer in (again, alone)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*weights, strict=True))


def test_a_run_whose_adapter_was_in_float32_goes_on_from_its_master_weights(
    chosen: TrainerSettings, tmp_path: Path
) -> None:
    earlier = Trainer(chosen, torch.bfloat16, of_adapter=torch.float32)
    earlier.take(range(2))
    earlier.save(store := StateStore(tmp_path / "saved"))
    again = Trainer(chosen, torch.bfloat16)
    again.resume(store)
    parameters = trained_parameters(again.policy).values()
    masters = zip(again.optimizer.masters, earlier.optimizer.masters, parameters, strict=True)
    for mine, theirs, parameter in masters:
        assert torch.equal(mine, theirs)
        assert torch.equal(parameter, theirs.bfloat16())
    again.take(range(2, 3))
