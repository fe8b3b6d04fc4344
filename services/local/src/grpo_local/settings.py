"""Options of `grpo-demo`."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from grpo_core.settings import CommandSettings


def half_the_cores() -> int:
    """Server and trainer compute at the same time: each gets half, so that neither waits."""
    return max(1, (os.cpu_count() or 1) // 2)


class DemoSettings(CommandSettings):
    """Train a model with GRPO on this machine's CPU and show the progress: Redis, run-api, vLLM
    server, environment and trainer as local processes, no GPU, container or model hub needed."""

    model_config = SettingsConfigDict(cli_prog_name="grpo-demo", env_prefix="GRPO_DEMO_")

    model: str | None = Field(
        None, description="checkpoint directory or hub id; a tiny model is made when not given"
    )
    run_dir: Path | None = Field(
        None,
        description="directory for logs, metrics and checkpoints, new or empty; "
        "runs/<UTC time>-<seed> when not given",
    )
    seed: int = Field(0, ge=0, description="seed of sampling, data order and training")
    steps: int = Field(250, ge=1, description="training steps (optimizer updates)")
    batch_size: int = Field(64, ge=1, description="sequences per forward pass")
    gradient_accumulation_steps: int = Field(
        2, ge=1, description="forward passes per training step"
    )
    group_size: int = Field(8, ge=2, description="completions sampled per prompt")
    lr: float = Field(3e-4, gt=0, description="peak learning rate of AdamW")
    warmup_steps: int = Field(5, ge=0, description="steps over which the learning rate rises")
    max_completion_tokens: int = Field(8, ge=1, description="longest completion, in tokens")
    seq_len: int = Field(128, ge=2, description="longest prompt plus completion, in tokens")
    max_batches_offpolicy: int = Field(
        1, ge=1, description="batches that may wait in the queue before sampling pauses"
    )
    step_deadline_s: float = Field(
        120.0, gt=0, description="seconds without a finished training step until the run fails"
    )
    model_deadline_s: float = Field(
        600.0, gt=0, description="seconds that making the tiny model may take"
    )
    server_deadline_s: float = Field(
        180.0, gt=0, description="seconds until the vLLM server must be healthy"
    )
    start_deadline_s: float = Field(
        60.0, gt=0, description="seconds until any other service must be healthy"
    )
    compute_threads: int = Field(
        default_factory=half_the_cores,
        ge=1,
        description="threads each for the vLLM server and the trainer; half the cores by default",
    )
