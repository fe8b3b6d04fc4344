"""The environment of a recipe: its data and its rewards, as options of `env-server`."""

from __future__ import annotations

from typing import Any

from grpo_offline.errors import RecipeInvalid
from grpo_offline.recipe.data import data_of, held_out
from grpo_offline.recipe.reading import Recipe


def environment_options(recipe: Recipe) -> dict[str, Any]:
    rewards = recipe["reward_funcs"]
    data = data_of(recipe)
    arguments = {
        "data": data.as_arguments(),
        "rewards": rewards,
        "stop": recipe["vllm_stop_sequences"] or [],
    }
    options: dict[str, Any] = {"task_args": arguments, "reward_weights": _weights(recipe)}
    options |= lengths(recipe)
    if recipe["system_prompt"] is not None:
        options["system_prompt"] = recipe["system_prompt"]
    if recipe["chat_template_kwargs"]:
        options["template_args"] = recipe["chat_template_kwargs"]
    share = held_out(recipe)
    if share is not None:
        options["held_out"] = share
    return options


def lengths(recipe: Recipe) -> dict[str, Any]:
    """Options of both commands for `max_prompt_length`."""
    if recipe["max_prompt_length"] is None:
        return {}
    # A sequence as long as the limit is dropped.
    return {"seq_len": recipe["max_prompt_length"] + recipe["max_completion_length"] + 1}


def _weights(recipe: Recipe) -> dict[str, float]:
    names, weights = recipe["reward_funcs"], recipe["reward_weights"]
    if weights is None:
        return dict.fromkeys(names, 1.0)
    if len(weights) != len(names):
        raise RecipeInvalid(
            f"reward_weights: {len(weights)} weights for the {len(names)} names of reward_funcs"
        )
    return dict(zip(names, weights, strict=True))
