"""A run of our trainer that two environments of atroposlib feed."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from grpo_local.processes import ManagedProcess
from grpo_local.services import child_environment
from tests.compat.upstream_install import Upstream
from tests.compat.upstream_processes import (
    MAX_TOKEN_LENGTH,
    left_in_session_of,
    start_environment,
)
from tests.fixtures.inference import InferenceServer

STEPS = 8
BATCH_SIZE = 32
TRAINING_DEADLINE_S = 400.0
ENVIRONMENT_END_DEADLINE_S = 300.0


@dataclass(frozen=True)
class Share:
    """What an environment announces: its group size, and its least part of every batch."""

    group_size: int
    minimum: float

    @property
    def least_groups(self) -> int:
        """That go into one batch."""
        return int(BATCH_SIZE * self.minimum) // self.group_size


SHARES = (Share(group_size=4, minimum=0.25), Share(group_size=8, minimum=0.5))


@dataclass(frozen=True)
class TrainingRun:
    """What is left of the run; `environment_exits` and `environment_logs` in the order of SHARES.

    `final_model` holds the weights that the inference server serves since.
    """

    trainer_exit: int
    environment_exits: list[int]
    environment_logs: list[str]
    records: list[dict[str, float]]
    left_processes: list[int]
    final_model: Path


def train(
    upstream: Upstream, api_url: str, server: InferenceServer, directory: Path
) -> TrainingRun:
    """Raises `ProcessFailed` where a process does not end in time."""
    trainer = _start_trainer(api_url, server, directory)
    environments = [
        start_environment(
            upstream,
            api_url,
            server,
            directory / f"environment-{i}",
            *("--env.group_size", str(share.group_size)),
            *("--env.min_batch_allocation", str(share.minimum)),
        )
        for i, share in enumerate(SHARES)
    ]
    ours = [trainer, *environments]
    try:
        trainer_exit = trainer.wait(TRAINING_DEADLINE_S)
        environment_exits = [process.wait(ENVIRONMENT_END_DEADLINE_S) for process in environments]
        left = [pid for process in ours for pid in left_in_session_of(process)]
    finally:
        for process in ours:
            process.stop()
    return TrainingRun(
        trainer_exit=trainer_exit,
        environment_exits=environment_exits,
        environment_logs=[process.log_path.read_text() for process in environments],
        records=_records(directory),
        left_processes=left,
        final_model=directory / "checkpoints" / "final_model",
    )


def _records(directory: Path) -> list[dict[str, float]]:
    """One per step; none where the trainer ended before its first."""
    path = directory / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _start_trainer(api_url: str, server: InferenceServer, directory: Path) -> ManagedProcess:
    options = {
        "--model-name": server.model,
        "--weight-bridge-mode": "shared_vllm",
        "--atropos-url": api_url,
        "--vllm-url": server.url,
        "--weights-socket": server.socket,
        "--training-steps": STEPS,
        "--batch-size": BATCH_SIZE,
        "--gradient-accumulation-steps": 1,
        "--seq-len": MAX_TOKEN_LENGTH,
        "--lr": 5e-5,
        "--dtype": "float32",
        "--verify-every-steps": 1,
        "--metrics-file": directory / "metrics.jsonl",
        "--save-path": directory / "checkpoints",
    }
    return ManagedProcess(
        "trainer",
        [sys.executable, "-m", "grpo_trainer", *(str(w) for pair in options.items() for w in pair)],
        directory / "trainer.log",
        child_environment(threads=1, model=str(server.model)),
    )
