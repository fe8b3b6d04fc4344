"""The models that a command serves: a directory, an id on the hub, SmolLM2, or an adapter."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_core.settings.machine import MADE_HERE, SMOLLM2, TINY, unusable_model
from grpo_core.weights.directory_checks import (
    ADAPTER_CONFIG,
    LORA_RANKS,
    UnusableWeights,
    lora_config,
    require_complete,
)
from grpo_core.weights.ref import WeightKind

A_MODEL = (
    "a directory, an id on the Hugging Face hub, smollm2 (SmolLM2-135M-Instruct, made from two "
    "optional packages) or tiny (a model of one million parameters, made on first use)"
)
"""Values of --model, for the user."""
_LIMITS = ("max_position_embeddings", "n_positions")
_LIMITS_OF_MADE = {SMOLLM2: 8192, TINY: 2048}
"""Options are checked before these are made."""
MAX_MODEL_LEN = 4096
"""The default of --max-model-len, unless the model allows less."""


def default_max_model_len(model: str) -> int:
    return min(MAX_MODEL_LEN, longest_sequence(model) or MAX_MODEL_LEN)


def longest_sequence(model: str) -> int | None:
    """The model's limit, in tokens; None if its configuration names none, or cannot be read.

    Args:
        model: a directory, an id on the Hugging Face hub, TINY or SMOLLM2
    """
    if model in _LIMITS_OF_MADE:
        return _LIMITS_OF_MADE[model]
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


BASE = "base"


@dataclass(frozen=True)
class EvaluatedModel:
    """`name`: for the user; `served`: the model that the server loads; `adapter`: loaded into that
    server, an absolute path without links, or None."""

    name: str
    served: str
    adapter: Path | None = None


def evaluated_model(name: str, base_model: str | None = None) -> EvaluatedModel:
    """Args:
        name: a directory of a model or of an adapter, an id on the hub, TINY or SMOLLM2
        base_model: of an adapter; None: as its configuration names it

    Raises:
        UnusableWeights: the model, the adapter or its base model cannot be served.
    """
    directory = Path(name)
    if name in MADE_HERE or not (directory / ADAPTER_CONFIG).is_file():
        if problem := unusable_model(name):
            raise UnusableWeights(problem)
        return EvaluatedModel(name, name)
    require_complete(WeightKind.ADAPTER, directory)
    served = base_model or lora_config(directory).base_model_name_or_path
    if not served:
        file = directory / ADAPTER_CONFIG
        raise UnusableWeights(f"{file} names no base_model_name_or_path; pass --base-model")
    if problem := unusable_model(served):
        raise UnusableWeights(f"the base model of {name}: {problem}; pass --base-model")
    return EvaluatedModel(name, served, directory.resolve())


def by_server(models: Sequence[EvaluatedModel]) -> dict[str, list[EvaluatedModel]]:
    """The models that each server evaluates, by the model that it loads.

    The base model comes before adapters: once an adapter is loaded, /generate uses it.
    """
    groups: dict[str, list[EvaluatedModel]] = {}
    for model in sorted(models, key=lambda model: model.adapter is not None):
        groups.setdefault(model.served, []).append(model)
    return groups


def adapter_flags(models: Sequence[EvaluatedModel]) -> list[str]:
    """Options of a server that loads the adapters of these models; none without adapters.

    Raises:
        UnusableWeights: an adapter's configuration is invalid, or its rank too high for vLLM.
    """
    adapters = [model.adapter for model in models if model.adapter]
    if not adapters:
        return []
    ranks = {adapter: lora_config(adapter).rank for adapter in adapters}
    highest = max(adapters, key=lambda adapter: ranks[adapter])
    accepted = [rank for rank in LORA_RANKS if rank >= ranks[highest]]
    if not accepted:
        raise UnusableWeights(
            f"{highest}: the adapter has rank {ranks[highest]}, and vLLM serves at most "
            f"{LORA_RANKS[-1]}; merge the adapter into its base model and evaluate that model"
        )
    below = os.path.commonpath([adapter.parent for adapter in adapters])
    return ["--enable-lora", "--max-lora-rank", str(accepted[0]), "--weights-dir", below]
