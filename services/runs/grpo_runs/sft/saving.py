"""Writes the trained model, in everything else like its base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from grpo_core.weights.model_files import load_tokenizer
from grpo_trainer.model.loading import write_model
from grpo_trainer.optim.master_update import StochasticRounding


def save_like(base: str, policy: Any, target: Path, seed: int) -> None:
    """Write the model in the data type of its base, with the base's configuration and tokenizer.

    Updates are mostly smaller than the distance of two bfloat16 numbers. Rounding to the nearest
    would lose them, and with them the training, so the rounding is stochastic.

    Args:
        base: a directory, or an id on the hub
        policy: in float32; it is rounded in place
        target: does not exist yet; it is complete or absent
        seed: of the rounding
    """
    policy.config = AutoConfig.from_pretrained(base)  # TRL has changed it
    if policy.config.dtype == torch.bfloat16:
        _round(policy, seed)
    else:
        policy.to(policy.config.dtype or torch.float32)
    staging = target.with_name(f".{target.name}")
    write_model(policy, base, staging)
    load_tokenizer(base, transformers).save_pretrained(staging)
    staging.rename(target)


def _round(policy: torch.nn.Module, seed: int) -> None:
    rounding = StochasticRounding(seed, next(policy.parameters()).device)
    rounding.begin_step(0)
    for parameter in policy.parameters():
        narrow = torch.empty_like(parameter, dtype=torch.bfloat16, requires_grad=False)
        rounding.round_into(narrow, parameter.detach())
        parameter.data = narrow
