"""Runs `grpo`, with a journal, and holds it at a stage of its step if a test requests it.

A test writes the name of a stage and a token into a file. At that stage the trainer writes both
into another file and waits until the first file changes or disappears. So a test can kill a process
at exactly that moment. The journal lists the batch of each step, below the save path. Nothing else
differs from `grpo`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_core.clients.run_api import TrainerClient
from grpo_trainer import __main__ as grpo
from grpo_trainer.checkpoint import store
from grpo_trainer.checkpoint.parts import StatePart
from grpo_trainer.data.batches import BatchSource
from grpo_trainer.data.collate import Batch
from grpo_trainer.data.filter import digest
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.weight_sync import collective, shared
from tests.whole_run.journal import JOURNAL, Journal
from tests.whole_run.stages import (
    HALF_SAVED,
    HALF_WRITTEN,
    PART_WRITTEN,
    PAUSED,
    SAVED,
    SENDING,
    TRAINING,
    VARIABLE,
    VERIFYING,
    WAITING,
    Stages,
)


def hold_at(stages: Stages) -> None:
    """Add a stop before each stage of the step, and one within the writing of the weights."""
    for owner, name, stage in (
        (TrainerClient, "poll", WAITING),
        (MasterOptimizer, "step", TRAINING),
        (MasterOptimizer, "write_into_parameters", PAUSED),
        (shared, "require_written", VERIFYING),
        (store, "_write_record", HALF_SAVED),
        (TrainerClient, "acknowledge", SAVED),
    ):
        setattr(owner, name, _after(stages, stage, getattr(owner, name)))
    if os.environ.get("RANK", "0") != "0":
        StatePart.write = _after(stages, PART_WRITTEN, StatePart.write)  # type: ignore[method-assign]
    collective.broadcast = _before(stages, SENDING, collective.broadcast)
    torch._foreach_copy_ = _in_two_halves(stages, torch._foreach_copy_)


def _after(stages: Stages, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def stopping(*args: Any, **options: Any) -> Any:
        stages.reach(stage)
        return call(*args, **options)

    return stopping


def _before(stages: Stages, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def stopping(*args: Any, **options: Any) -> Any:
        result = call(*args, **options)
        stages.reach(stage)
        return result

    return stopping


def _in_two_halves(stages: Stages, copy: Callable[..., None]) -> Callable[..., None]:
    """Only the optimizer's write of the weights calls this function."""

    def copying(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        middle = len(targets) // 2
        copy(targets[:middle], sources[:middle])
        stages.reach(HALF_WRITTEN)
        copy(targets[middle:], sources[middle:])

    return copying


@functools.cache
def _journal(directory: Path) -> Journal:
    return Journal(directory, "trainer")


def _noting(look: Callable[..., Any]) -> Callable[..., Any]:
    def looking(source: Any, position: Any) -> Any:
        taken = look(source, position)
        if not isinstance(taken, Batch):
            return taken
        _journal(source.settings.save_path / JOURNAL).note(
            step=position.step + 1,
            epoch=position.epoch,
            batch=taken.batch_id,
            groups=[digest(group).hex() for group in taken.groups],
            versions=[v for one in taken.sequences for v in one.versions or ()],
        )
        return taken

    return looking


if __name__ == "__main__":
    hold_at(Stages(Path(os.environ[VARIABLE])))
    BatchSource.look = _noting(BatchSource.look)  # type: ignore[method-assign]
    grpo.main()
