"""Saves the trained model where and how transformers expects it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import structlog

from grpo_trainer.save_path import whole_directory

log = structlog.get_logger()

FINAL_MODEL = "final_model"


def step_directory(step: int) -> str:
    """Of the model after so many steps."""
    return f"step_{step}"


def save_model(policy: Any, model_name: str, target: Path) -> None:
    """Write model and tokenizer to `target`, complete and durable or not at all.

    Raises:
        CheckpointNotSaved: the disk is full, or the like.
    """
    from transformers import AutoTokenizer, GenerationConfig

    with whole_directory(target) as directory:
        with contextlib.suppress(OSError):  # most models have one; without, the configuration's
            policy.generation_config = GenerationConfig.from_pretrained(model_name)
        # Views share one storage, which would be taken for tied weights: save separate tensors.
        tensors = {name: p.detach().clone() for name, p in policy.named_parameters()}
        policy.save_pretrained(directory, state_dict=tensors)
        AutoTokenizer.from_pretrained(model_name).save_pretrained(directory)
    log.info("saved", directory=str(target))
