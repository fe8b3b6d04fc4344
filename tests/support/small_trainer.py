"""A trainer of three small tensors that uses everything that a checkpoint contains."""

from __future__ import annotations

import random
from pathlib import Path

import numpy
import torch
from torch import nn

from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer.checkpoint.parts import StatePart
from grpo_trainer.checkpoint.resume import require_fit
from grpo_trainer.checkpoint.store import SavedState, StateStore, capture
from grpo_trainer.data.batches import Position
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.optim.schedule import Schedule

SETTINGS = CommandLine(model="m", mode="shared_vllm").settings()


class Side:
    """A model in bf16 whose third tensor never gets a gradient, and its optimizer."""

    def __init__(self, seed: int = 0, width: int = 4) -> None:
        torch.manual_seed(seed)
        self.model = nn.Module()
        for name in ("first", "second", "unused"):
            weights = torch.randn(width, 3).to(torch.bfloat16)
            self.model.register_parameter(name, nn.Parameter(weights))
        self.optimizer = MasterOptimizer(
            self.model.parameters(), Schedule("constant", 0.1, 4, 100), 0.01, max_grad_norm=1.0
        )

    def step(self, step: int) -> float:
        """Take a step on a loss that draws from every random generator, like one with dropout.
        Returns a number that depends on the weights and on all generators."""
        first, second = (self.model.get_parameter(name) for name in ("first", "second"))
        loss = (torch.randn_like(first) * first + second**2).float().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = self.optimizer.step(step)
        self.optimizer.write_into_parameters()
        return norm + random.random() + float(numpy.random.standard_normal())

    def save(self, store: StateStore, step: int = 3) -> Path:
        position = Position(step=step, batch_id=step + 4, epoch=2)
        record = capture(self.model, self.optimizer, SETTINGS, position, "r", frozen=None)
        tensors = self.optimizer.tensors(list(record.parameters))
        return store.save(record, StatePart.copied(tensors, leads=True))

    def resume(self, saved: SavedState | None) -> None:
        """Restore the checkpoint, and write the master weights into the parameters."""
        assert saved is not None
        require_fit(saved.record, self.model, SETTINGS, "here")
        saved.load(self.model, self.optimizer)
        self.optimizer.write_into_parameters()
