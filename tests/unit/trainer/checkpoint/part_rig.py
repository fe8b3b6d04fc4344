"""Processes that restore a checkpoint of a tiny model, and save it again."""

from __future__ import annotations

import json
import os
import resource
import signal
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_core.tree.optim import ProcessOptions
from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer.checkpoint import store
from grpo_trainer.checkpoint.background import Background
from grpo_trainer.checkpoint.parts import SavedTensors, StatePart
from grpo_trainer.checkpoint.resume import restore_part
from grpo_trainer.checkpoint.store import SavedState, StateStore, capture, save_part
from grpo_trainer.data.batches import Position
from grpo_trainer.learner import Learner, build_learner
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.ranks import ALONE, Ranks, join
from tests.support.forked import forked

DEADLINE_S = 120.0


@dataclass(frozen=True)
class Processes:
    """Args: killed: the rank that is killed: rank 0 before it writes the record, another one before
    it writes its part"""

    count: int
    fsdp: bool = True
    killed: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def learner(self, model: Path, ranks: Ranks) -> Learner:
        fixed = {"model": str(model), "mode": "none", "optimizer": "adamw", "world_size": 2}
        divides = {"fsdp": self.fsdp and self.count > 1}
        given = CommandLine.model_validate({**fixed, **divides, **self.options})
        policy = TrainedWeights(str(model)).load(torch.float32).eval()
        return build_learner(policy, given.settings(), ranks)

    def pass_on(self, model: Path, source: SavedState | None, target: Path) -> list[int | None]:
        """Restore the checkpoint, or take a step if there is none; then save one in the save path
        `target`. Returns the exit codes."""
        if self.count == 1 and self.killed is None:
            _pass_on(self, model, source, target, ALONE)
            return [0]
        target.mkdir(exist_ok=True)
        given = (self, model, source, target)
        processes = [
            forked().Process(target=_work, args=(rank, *given)) for rank in range(self.count)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(DEADLINE_S)
            process.kill()
        (target / "meeting").unlink(missing_ok=True)
        return [process.exitcode for process in processes]


def _work(
    rank: int, processes: Processes, model: Path, source: SavedState | None, target: Path
) -> None:
    torch.set_num_threads(1)
    ranks = ALONE
    if processes.count > 1:
        meeting = {"init_method": (target / "meeting").as_uri(), "rank_deadline_s": 2 * DEADLINE_S}
        numbers = {"world_size": processes.count, "trainer_rank": rank}
        ranks = join(ProcessOptions.model_validate(numbers | meeting))
    if rank == processes.killed:
        owner: Any = StatePart if rank else store
        setattr(owner, "write" if rank else "_write_record", _kill_this_process)
    _pass_on(processes, model, source, target, ranks)
    os._exit(0)


def _kill_this_process(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _pass_on(
    processes: Processes, model: Path, source: SavedState | None, target: Path, ranks: Ranks
) -> None:
    learner = processes.learner(model, ranks)
    policy, optimizer = learner.policy, learner.optimizer
    held = [peak_bytes()]
    if source is None:
        _step(learner)
    elif ranks.leads:
        source.load(policy, optimizer, ranks if optimizer.parts > 1 else ALONE)
    else:
        restore_part(source.directory, policy, optimizer, ranks)
    held.append(peak_bytes())
    writer = Background(ranks, optimizer.parts)
    if ranks.leads:
        position = Position(step=1, batch_id=2, epoch=3)
        record = capture(policy, optimizer, learner.settings, position, "r", frozen=None)
        saved = StateStore(target)
        writer.begin(optimizer.tensors(learner.names), partial(saved.save, record))
    elif optimizer.parts > 1:
        writer.begin(optimizer.tensors(learner.names), save_part)
    writer.finished(wait=True)
    held.append(peak_bytes())
    grown = [after - before for before, after in pairwise(held)]
    (target / f"memory-{ranks.index}").write_text(json.dumps([*grown, optimizer.state_bytes()]))


def peak_bytes() -> int:
    """Most memory that this process has had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _step(learner: Learner) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in list(trained_parameters(learner.policy).values())[:-1]:  # one has no step
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    learner.optimizer.gradients.gather()
    learner.optimizer.step(0)


def newest(save_path: Path) -> SavedState:
    found = StateStore(save_path).newest()
    assert found is not None
    return found


def tensors_of(saved: SavedState) -> dict[str, Tensor]:
    """Whole, whatever the number of its parts."""
    names = list(saved.record.parameters)
    return dict(
        SavedTensors(
            saved.directory, lambda _, shape, dtype: torch.empty(shape, dtype=dtype), names
        )
    )
