"""A small run with a real Redis and run-api, and a trainer in this process without a server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from grpo_core.clients.run_api import TrainerClient
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_runs.offline.local import WeightsInProcess
from grpo_trainer.data.batches import Position
from grpo_trainer.stop import Stop
from grpo_trainer.train import open_run, training_steps

RUN_ID = "golden"
MODEL, SAVED, REDIS, FACTS, DEMO = "model", "saved", "redis", "golden.json", "demo.yaml"
"""In the directory of the run, which must be the working directory: a checkpoint names its model.
`DEMO`: all options of `grpo-demo`."""
STATE_INTERVAL = 2


def group(marker: int, size: int = 2, **changes: Any) -> dict[str, Any]:
    """A group that can be trained on, whose first token is a marker."""
    prompt = [MASKED, MASKED]
    return {
        "tokens": [[marker, 5, 7 + row, 8] for row in range(size)],
        "masks": [[*prompt, 7 + row, 8] for row in range(size)],
        "scores": [float(row) for row in range(size)],
        "inference_logprobs": [[PROMPT_LOGPROB] * 2 + [-0.1 * marker, -0.2] for _ in range(size)],
        **changes,
    }


def trainer_settings(url: str, steps: int) -> TrainerSettings:
    return CommandLine.model_validate(
        {
            **{"model": MODEL, "save_path": SAVED, "mode": "none", "run_api_url": url},
            **{"redis_url": "redis://127.0.0.1:1/0", "dtype": "float32", "device": "cpu"},
            **{"batch_size": 4, "gradient_accumulation_steps": 1, "seq_len": 16, "lr": 1e-3},
            **{"steps": steps, "state_interval": STATE_INTERVAL, "checkpoint_interval": 0},
            "metrics_file": f"{SAVED}/metrics.jsonl",
        }
    ).settings()


def train(url: str, steps: int) -> Iterator[Position]:
    """The position after each step."""

    @contextlib.contextmanager
    def weights(settings: TrainerSettings) -> Iterator[WeightsInProcess]:
        yield WeightsInProcess(settings, samples=True)

    settings = trainer_settings(url, steps)
    with TrainerClient(url) as api, open_run(settings, api, weights) as opened:
        if opened is not None:
            yield from training_steps(*opened, Stop())
