"""Environments as processes, and a trainer that only asks for batches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from grpo_core.run_api_client import TrainerClient
from grpo_core.wire import Registration
from grpo_local.processes import ManagedProcess

BATCH_DEADLINE_S = 60.0
EXIT_DEADLINE_S = 30.0


@contextmanager
def environment(
    task: str, run_api_url: str, inference_url: str, model: Path, log: Path, *options: str
) -> Iterator[ManagedProcess]:
    """`env-server TASK serve` in groups of 2; killed at the end where it still runs."""
    command = [
        *(sys.executable, "-m", "grpo_env", task, "serve"),
        *("--env.rollout-server-url", run_api_url),
        *("--env.group-size", "2"),
        *("--openai.base-url", f"{inference_url}/v1"),
        *("--openai.model-name", str(model)),
        *options,
    ]
    process = ManagedProcess(
        f"environment-{task}", command, log, {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    )
    try:
        yield process
    finally:
        process.kill()


def register_trainer(trainer: TrainerClient, **changes: Any) -> None:
    """Announce a trainer whose batches have 8 sequences, and poll once, as environments need."""
    registration = {
        "wandb_group": "",
        "wandb_project": "",
        "batch_size": 8,
        "max_token_len": 400,
        "checkpoint_dir": "",
        "save_checkpoint_interval": 1,
        "starting_step": 0,
        "num_steps": 1000,
    }
    uuid = trainer.register(Registration.model_validate(registration | changes))
    httpx.get(f"{trainer.base_url}/batch", params={"trainer": uuid}).raise_for_status()
