"""Steps of SmolLM2-135M with a full micro-batch: `python -m tests.real.full_micro_batch OPTIONS`.

Prints the peak of this process' memory and the plan's, as JSON. Args: OPTIONS: of `grpo`, as JSON
"""

from __future__ import annotations

import json
import random
import resource
import sys
from typing import Any

import torch

from benchmarks.train_bench.our_side import batch_of
from grpo_core.tree.trainer_command import CommandLine
from grpo_tiny_model.smollm2 import ensure_smollm2
from grpo_trainer.learner import build_learner
from grpo_trainer.memory_plan import memory_plan
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.model.policy import vocabulary_of
from grpo_trainer.ranks import ALONE

LENGTH, STEPS = 256, 3


def main(options: dict[str, Any]) -> None:
    line = CommandLine.model_validate({"model": str(ensure_smollm2()), "device": "cpu", **options})
    settings = line.settings()
    policy: Any = TrainedWeights(line.model, settings.lora).load(getattr(torch, line.dtype)).eval()
    learner = build_learner(policy, settings, ALONE)
    tokens = settings.micro_batch_tokens
    batch = batch_of(
        full(2 * tokens, vocabulary_of(policy)) | {"tokens_per_micro_batch": tokens},
        vocabulary_of(policy),
        learner.forward.layout.cut,
    )
    for step in range(STEPS):
        learner.accumulate(batch, settings.resolved_objective, step)
        learner.optimizer.step(step)
        learner.optimizer.write_into_parameters()
    plan = memory_plan(settings).trainer_bytes(settings.gradient_checkpointing)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(json.dumps({"peak_bytes": peak, "planned_bytes": plan}) + "\n")


def full(tokens: int, vocabulary: int) -> dict[str, Any]:
    """Groups of two completions whose prompts have no beginning in common."""
    draw = random.Random(0)

    def row(length: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(length)]

    count = tokens // LENGTH
    return {
        "group_size": 2,
        "prompts": [row(LENGTH // 2) for _ in range(count)],
        "completions": [row(LENGTH // 2) for _ in range(count)],
        "logprobs": [[-1.0] * (LENGTH // 2) for _ in range(count)],
        "scores": [float(i % 2) for i in range(count)],
    }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
