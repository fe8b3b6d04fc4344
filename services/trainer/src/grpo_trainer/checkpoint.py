"""Saves the trained model where and how transformers expects it."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import structlog

from grpo_trainer.errors import UnusableSavePath

log = structlog.get_logger()

FINAL_MODEL = "final_model"


def prepare_save_path(save_path: Path) -> None:
    """Find out before the first step whether the last one will have where to go.

    Raises:
        UnusableSavePath: it cannot be written.
    """
    trial = save_path / f".writable.{os.getpid()}"
    try:
        save_path.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise UnusableSavePath(
            f"--save-path {save_path}: {error}; choose a directory that this user can write"
        ) from error


def save_final_model(policy: Any, model_name: str, save_path: Path) -> Path:
    """Write model and tokenizer to `save_path`/final_model, complete or not at all."""
    from transformers import AutoTokenizer, GenerationConfig

    target = save_path / FINAL_MODEL
    staging = save_path / f".{FINAL_MODEL}.{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    with contextlib.suppress(OSError):  # most models have one; without, the configuration's counts
        policy.generation_config = GenerationConfig.from_pretrained(model_name)
    # Views share one storage, which would be taken for tied weights: save separate tensors.
    tensors = {name: p.detach().clone() for name, p in policy.named_parameters()}
    policy.save_pretrained(staging, state_dict=tensors)
    AutoTokenizer.from_pretrained(model_name).save_pretrained(staging)
    _replace(target, staging)
    log.info("saved", directory=str(target))
    return target


def _replace(target: Path, staging: Path) -> None:
    """At every moment one complete model is there, under its name or beside it."""
    former = target.with_name(f".{target.name}.former.{os.getpid()}")
    if target.exists():
        target.rename(former)
    staging.rename(target)
    shutil.rmtree(former, ignore_errors=True)
