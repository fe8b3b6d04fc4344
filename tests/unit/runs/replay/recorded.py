"""A short run in this process, which is killed and resumed, and what replays of it print.

Its checkpoints are of steps 0, 1, 3, 5 and 6."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from grpo_core.provenance.chain import Provenance
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_runs.offline.local import WeightsInProcess
from grpo_runs.replay.command import replay_run
from grpo_runs.settings.replay import ReplaySettings
from grpo_trainer.stop import Stop
from grpo_trainer.train import open_run, training_steps
from tests.unit.trainer.ranks.test_loop import Queue

KILLED_AFTER, STEPS = 4, 6
FIXED: dict[str, Any] = {
    **{"redis_url": "redis://127.0.0.1:1/0", "dtype": "float32", "device": "cpu", "lr": 1e-3},
    **{"seq_len": 64, "tokens_per_micro_batch": 16, "state_interval": 2, "checkpoint_interval": 0},
}
KL = {"kl_coef": 0.1, "kl_control": "adaptive", "kl_target": 0.01, "kl_horizon": 20}
TEACHER = {"distill_coef": 0.5}
DROPOUT = {"mode": "lora_only", "lora_dropout": 0.2, "lora_r": 4, **KL, **TEACHER}


def train(model: str, save_path: Path, **options: Any) -> Path:
    """Step 4 is lost: the trainer is killed after it, and resumes from a checkpoint of step 3 with
    another learning rate. The queue's second batch is not finite, and is skipped. Before the third
    one, a checkpoint is saved early."""

    @contextlib.contextmanager
    def weights(settings: TrainerSettings) -> Iterator[WeightsInProcess]:
        yield WeightsInProcess(settings, samples=True)

    queue: Any = Queue()
    for steps, lr in ((KILLED_AFTER, 1e-3), (STEPS, 2e-3)):
        given = {"mode": "none", **FIXED, **options, "model": model, "save_path": save_path}
        settings = CommandLine.model_validate({**given, "steps": STEPS, "lr": lr}).settings()
        with open_run(settings, queue, weights) as opened:
            assert opened is not None
            for position in training_steps(*opened, Stop()):
                if position.step == steps:
                    break
    return save_path


def replay(run: Path, **options: Any) -> tuple[bool, str]:
    """Whether the replay gave the recorded numbers, and what it printed."""
    settings = ReplaySettings(run=run, **{"step": STEPS, **options})
    lines: list[str] = []
    threads = torch.get_num_threads()
    try:
        passes = replay_run(Provenance.of(run), settings, lines.append)
    finally:
        torch.set_num_threads(threads)
    return passes, "\n".join(lines)


def flip(path: Path, at: int) -> None:
    """Change one bit. Args: at: place of the byte; from the end if negative"""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
