"""The one place that decides how many ranks may train."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_offline.errors import RecipeInvalid

WORLD_SIZE = "WORLD_SIZE"
"""Set by accelerate and torchrun for each rank."""
_SHARDED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}


def require_one_rank(environment: Mapping[str, str]) -> None:
    """Raises `RecipeInvalid`: accelerate started several ranks, or shards the model."""
    count = environment.get(WORLD_SIZE, "1")
    if count != "1":
        raise RecipeInvalid(
            f"{WORLD_SIZE} is {count}: the offline trainer has one rank; start training.sh with "
            "TRAIN_RANKS=1, or accelerate launch with --num_processes 1"
        )
    for variable, name in _SHARDED.items():
        if environment.get(variable, "").lower() == "true":
            raise RecipeInvalid(
                f"{variable}: the offline trainer does not use {name}; pass the --config_file "
                "recipes/accelerate_configs/one_rank.yaml"
            )
