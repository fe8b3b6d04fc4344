"""The keys of recipes as dataclasses: `load_configs(["--config", "recipe.yaml"])`.

`python src/grpo.py --help` describes every key.
"""

from grpo_runs.recipe.data import DatasetConfig, DatasetMixtureConfig
from grpo_runs.recipe.keys import (
    Configs,
    GRPOConfig,
    ModelConfig,
    ScriptArguments,
    load_configs,
)

__all__ = [
    "Configs",
    "DatasetConfig",
    "DatasetMixtureConfig",
    "GRPOConfig",
    "ModelConfig",
    "ScriptArguments",
    "load_configs",
]
