"""The archived trainer's own functions on run-api's data: register, fetch, pad, train.

Called as `python archived_trainer.py <request.json> <answer.json>`.

`example_trainer` comes from the unpacked wheel. Only how it takes the server's weights, CUDA IPC,
is left out: the model is an ordinary checkpoint of the weights that are served.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from example_trainer import training
from example_trainer.api import check_atropos_api, get_batch, register_trainer
from example_trainer.config import TrainingConfig
from example_trainer.data import get_data, pad_data_to_good_offset
from example_trainer.trainers import create_optimizer
from transformers import AutoModelForCausalLM

KEYS = (
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params"),
    *("inference_logprobs", "overrides", "group_overrides", "images", "env_id"),
    *("distill_token_ids", "distill_logprobs"),
)
"""What the archived server puts into every item of a batch."""


def register(config: TrainingConfig) -> dict[str, Any]:
    """As every archived training mode begins; the poll lets environments in."""
    reachable = check_atropos_api(config.atropos_url, timeout=120)
    register_trainer(config)
    return {"reachable": reachable, "first_poll": get_batch(config.atropos_url)}


def train(config: TrainingConfig) -> dict[str, Any]:
    """One batch looked at, then it and all that are waiting trained on, one step each."""
    model = AutoModelForCausalLM.from_pretrained(config.model_name, dtype=torch.float32).eval()
    optimizer = create_optimizer(model, config)
    data = get_batch(config.atropos_url)
    items = [{key: item[key] for key in KEYS} for item in data["batch"]]
    environments = sorted({item["env_id"] for item in items})
    scores = [score for item in items for score in item["scores"]]
    batches = [pad_data_to_good_offset(data, config.batch_size)]
    waiting, _ = get_data(config.batch_size, config.seq_len, config.atropos_url)
    batches += waiting
    steps = [step(config, model, optimizer, i, *batch) for i, batch in enumerate(batches)]
    return {"environments": environments, "scores": scores, "steps": steps}


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
    sampled = torch.cat([row[label != -100] for row, label in zip(logprobs, labels, strict=True)])
    return {
        **stats,
        "alignment": dict(training._logprob_alignment_stats),
        "sequences": sum(len(rows) for rows in tokens),
        "widths": sorted({rows.shape[1] for rows in (*tokens, *labels, *logprobs)}),
        "prompt_logprobs": sorted(set(prompt.tolist())),
        "largest_sampled_logprob": sampled.max().item(),
        "temperatures": sorted({t for rows in temperatures for t in rows.flatten().tolist()}),
    }


ACTIONS = {"register": register, "train": train}

if __name__ == "__main__":
    request_path, answer_path = map(Path, sys.argv[1:])
    request = json.loads(request_path.read_text())
    answer = ACTIONS[request["action"]](TrainingConfig(**request["config"]))
    answer_path.write_text(json.dumps(answer))
