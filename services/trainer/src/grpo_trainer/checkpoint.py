"""Saves the trained model where and how transformers expects it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import structlog

log = structlog.get_logger()

FINAL_MODEL = "final_model"


def save_final_model(policy: Any, model_name: str, save_path: Path) -> Path:
    """Write model and tokenizer to `save_path`/final_model, complete or not at all."""
    from transformers import AutoTokenizer

    target = save_path / FINAL_MODEL
    staging = save_path / f".{FINAL_MODEL}.{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    # Views share one storage, which would be taken for tied weights: save separate tensors.
    tensors = {name: p.detach().clone() for name, p in policy.named_parameters()}
    policy.save_pretrained(staging, state_dict=tensors)
    AutoTokenizer.from_pretrained(model_name).save_pretrained(staging)
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)
    log.info("saved", directory=str(target))
    return target
