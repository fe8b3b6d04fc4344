"""The training ranks: processes that accelerate or torchrun has started."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_offline.errors import RecipeInvalid

WORLD_SIZE, RANK = "WORLD_SIZE", "RANK"
"""Set by accelerate and torchrun for each rank."""
_SHARDED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "accelerate's FSDP; write `fsdp: full_shard` in the recipe",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}


def rank_count(environment: Mapping[str, str]) -> int:
    """Raises `RecipeInvalid`: accelerate shards the model."""
    for variable, name in _SHARDED.items():
        if environment.get(variable, "").lower() == "true":
            raise RecipeInvalid(
                f"{variable}: the trainer does not use {name}; pass the --config_file "
                "recipes/accelerate_configs/ranks.yaml"
            )
    return int(environment.get(WORLD_SIZE, "1"))


def is_leader(environment: Mapping[str, str]) -> bool:
    """Whether this rank samples, publishes and writes the files of the run."""
    return environment.get(RANK, "0") == "0"
