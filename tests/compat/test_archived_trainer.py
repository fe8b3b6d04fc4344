"""The archived trainer's code registers with run-api, takes batches, pads and trains on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_trainer.model.logprobs import token_values
from tests.compat.upstream_install import Upstream
from tests.compat.upstream_processes import run_archived_trainer

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]  # the first use installs atroposlib

MICRO_BATCH, ACCUMULATION, GROUP_SIZE = 4, 4, 4
BATCH_SIZE = MICRO_BATCH * ACCUMULATION
BATCHES = 2
PROMPT_TOKENS, TOKENS = 4, 12
NOISE_NATS = 1e-4


def group_sampled_by(model: Any, seed: int) -> dict[str, Any]:
    """Random tokens with the log-probabilities that the model gives them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(200, (GROUP_SIZE, TOKENS), generator=generator)
    with torch.no_grad():
        logp = token_values(model, ids[:, :-1], ids[:, 1:], torch.ones(GROUP_SIZE)).logp
    sampled = logp[:, PROMPT_TOKENS - 1 :].tolist()
    return {
        "tokens": ids.tolist(),
        "masks": [[-100] * PROMPT_TOKENS + row[PROMPT_TOKENS:] for row in ids.tolist()],
        "inference_logprobs": [[1.0] * PROMPT_TOKENS + row for row in sampled],
        "scores": [0.0, 1.0, 0.0, 1.0],
    }


def test_it_trains_on_the_weights_that_sampled(
    upstream: Upstream, clean_run_api: str, tiny_model: Path, tmp_path: Path
) -> None:
    """Measured by its own `alignment/diff_max`. A key missing from an item ends the script."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    config = {
        "model_name": str(tiny_model),
        "atropos_url": clean_run_api,
        "batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "seq_len": 128,
        "training_steps": BATCHES,
        "device": "cpu",
        "optimizer": "adamw",
    }
    groups = [group_sampled_by(model, i) for i in range(BATCHES * BATCH_SIZE // GROUP_SIZE)]
    seen = run_archived_trainer(upstream, {"config": config, "groups": groups}, tmp_path)

    assert (seen["reachable"], seen["first_poll"]) == (True, {"batch": None})
    assert len(seen["steps"]) == BATCHES
    for step in seen["steps"]:
        assert step["sequences"] == BATCH_SIZE
        assert (step["prompt_logprobs"], step["temperatures"]) == ([1.0], [1.0])
        assert 0.0 < step["grad_norm"] < 100.0
    first = seen["steps"][0]
    assert first["alignment"]["alignment/diff_max"] < NOISE_NATS
    assert first["mean_ratio"] == pytest.approx(1.0, abs=NOISE_NATS)
