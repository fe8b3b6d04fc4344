"""Reads the configuration of a model without loading the model."""

from __future__ import annotations

import json
from pathlib import Path

from grpo_core.settings.machine import SMOLLM2

_LIMITS = ("max_position_embeddings", "n_positions")
_LIMIT_OF_SMOLLM2 = 8192
"""Options are checked before it is made."""
MAX_MODEL_LEN = 4096
"""The default of --max-model-len, unless the model allows less."""


def default_max_model_len(model: str) -> int:
    return min(MAX_MODEL_LEN, longest_sequence(model) or MAX_MODEL_LEN)


def longest_sequence(model: str) -> int | None:
    """The model's limit, in tokens; None if its configuration names none, or cannot be read.

    Args:
        model: a directory, an id on the Hugging Face hub, or SMOLLM2
    """
    if model == SMOLLM2:
        return _LIMIT_OF_SMOLLM2
    try:
        config = json.loads(_config_file(model).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # the server reads the file too, and reports the problem
    config = config.get("text_config", config)
    return next((config[name] for name in _LIMITS if name in config), None)


def _config_file(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model) / "config.json"
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model, "config.json"))
