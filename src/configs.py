"""The keys of recipes as dataclasses: `load_configs(["--config", "recipe.yaml"])`.

`python src/grpo.py --help` describes every key.
"""

from grpo_offline.recipe.configs import (
    Configs,
    GRPOConfig,
    ModelConfig,
    ScriptArguments,
    load_configs,
)
from grpo_offline.recipe.datasets import DatasetConfig, DatasetMixtureConfig

__all__ = [
    "Configs",
    "DatasetConfig",
    "DatasetMixtureConfig",
    "GRPOConfig",
    "ModelConfig",
    "ScriptArguments",
    "load_configs",
]
