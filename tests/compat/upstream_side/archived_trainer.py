"""The archived trainer's own functions on run-api's data: register, fetch, pad, train.

Called as `python archived_trainer.py <request.json> <answer.json>`.

`example_trainer` comes from the unpacked wheel. Only how it takes the server's weights, CUDA IPC,
is left out: the model is an ordinary checkpoint of the weights that sampled the groups.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import requests
import torch
from example_trainer import training
from example_trainer.api import check_atropos_api, get_batch, register_trainer
from example_trainer.config import TrainingConfig
from example_trainer.data import get_data, pad_data_to_good_offset
from example_trainer.trainers import create_optimizer
from transformers import AutoModelForCausalLM


def train(config: TrainingConfig, groups: list[Any]) -> dict[str, Any]:
    """Register and poll as every archived training mode begins, then train on every batch."""
    reachable = check_atropos_api(config.atropos_url, timeout=120)
    register_trainer(config)
    first_poll = get_batch(config.atropos_url)
    for group in groups:
        requests.post(f"{config.atropos_url}/scored_data", json=group).raise_for_status()
    model = AutoModelForCausalLM.from_pretrained(config.model_name, dtype=torch.float32).eval()
    optimizer = create_optimizer(model, config)
    batches = [pad_data_to_good_offset(get_batch(config.atropos_url), config.batch_size)]
    waiting, _ = get_data(config.batch_size, config.seq_len, config.atropos_url)
    batches += waiting
    steps = [step(config, model, optimizer, i, *batch) for i, batch in enumerate(batches)]
    return {"reachable": reachable, "first_poll": first_poll, "steps": steps}


def step(
    config: TrainingConfig,
    model: Any,
    optimizer: Any,
    index: int,
    tokens: list[torch.Tensor],
    labels: list[torch.Tensor],
    advantages: list[torch.Tensor],
    temperatures: list[torch.Tensor],
    logprobs: list[torch.Tensor],
) -> dict[str, Any]:
    stats = training.run_training_step(
        model, optimizer, tokens, labels, advantages, temperatures, config, index, logprobs
    )
    prompt = torch.cat([row[label == -100] for row, label in zip(logprobs, labels, strict=True)])
    return {
        **stats,
        "alignment": dict(training._logprob_alignment_stats),
        "sequences": sum(len(rows) for rows in tokens),
        "prompt_logprobs": sorted(set(prompt.tolist())),
        "temperatures": sorted({t for rows in temperatures for t in rows.flatten().tolist()}),
    }


if __name__ == "__main__":
    request_path, answer_path = map(Path, sys.argv[1:])
    request = json.loads(request_path.read_text())
    answer = train(TrainingConfig(**request["config"]), request["groups"])
    answer_path.write_text(json.dumps(answer))
