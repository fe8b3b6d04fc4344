"""Batches, iterations and intervals of a recipe, counted as the offline trainer counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from grpo_offline.errors import RecipeInvalid
from grpo_offline.recipe.reading import Recipe

_MOST = 1_000_000
"""Models to keep, and training seeds: all."""
_EVAL_STEPS = 10
EVERY_ROW = _MOST


@dataclass(frozen=True)
class Sizes:
    """Args:
    steps: optimizer steps of the run
    save_interval, eval_interval: in iterations; save_interval 0: only the last model
    """

    problems: int
    iterations: int
    steps: int
    save_interval: int
    eval_interval: int
    keep: int


def sizes_of(recipe: Recipe, row_count: Callable[[], int], ranks: int = 1) -> Sizes:
    """Args:
        row_count: number of rows of training, which may take long to find
        ranks: number of training processes, each with its share of a step

    Raises `RecipeInvalid`: the sizes do not fit.
    """
    problems = _problems(recipe, ranks)
    device = recipe["per_device_train_batch_size"] * ranks
    per_step = device * recipe["gradient_accumulation_steps"]
    steps = -(-problems * recipe["num_generations"] // per_step)
    iterations = _iterations(recipe, problems, steps, row_count)
    return Sizes(
        problems,
        iterations,
        iterations * steps,
        _save_interval(recipe, problems, steps, row_count),
        _eval_interval(recipe, problems, steps, iterations, row_count),
        recipe["save_total_limit"] or _MOST,
    )


def _problems(recipe: Recipe, ranks: int) -> int:
    device, size = recipe["per_device_train_batch_size"] * ranks, recipe["num_generations"]
    per_generation = recipe["steps_per_generation"] or recipe["gradient_accumulation_steps"]
    if recipe["generation_batch_size"] is not None and recipe["steps_per_generation"] is not None:
        raise RecipeInvalid("generation_batch_size: excludes steps_per_generation")
    completions = recipe["generation_batch_size"] or device * per_generation
    if size < 2:
        raise RecipeInvalid(f"num_generations: expected 2 or more; got {size}")
    if completions % size:
        raise RecipeInvalid(
            f"num_generations: {size} does not divide the {completions} completions of a "
            "generation; change per_device_train_batch_size, gradient_accumulation_steps or "
            "generation_batch_size"
        )
    return int(completions // size)


def _iterations(recipe: Recipe, problems: int, steps: int, row_count: Callable[[], int]) -> int:
    if recipe["max_steps"] > 0:
        return -(-int(recipe["max_steps"]) // steps)
    if recipe["num_train_epochs"] <= 0:
        raise RecipeInvalid("num_train_epochs: expected above 0, or max_steps")
    return int(max(1, math.ceil(recipe["num_train_epochs"] * row_count() / problems)))


def _save_interval(recipe: Recipe, problems: int, steps: int, row_count: Callable[[], int]) -> int:
    strategy = recipe["save_strategy"]
    if strategy == "no":
        return 0
    if strategy == "epoch":
        return int(max(1, row_count() // problems))
    _require("save_strategy", strategy, "no, steps or epoch", "steps")
    if recipe["save_steps"] < 1:
        raise RecipeInvalid("save_steps: expected a number of steps, not a share of the run")
    return int(max(1, round(recipe["save_steps"] / steps)))


def _eval_interval(
    recipe: Recipe, problems: int, steps: int, iterations: int, row_count: Callable[[], int]
) -> int:
    strategy = recipe["eval_strategy"]
    if strategy == "epoch":
        return int(max(1, row_count() // problems))
    _require("eval_strategy", strategy, "no, steps or epoch", "no", "steps")
    every = recipe["eval_steps"] or _EVAL_STEPS
    return int(max(1, round(every * iterations if every < 1 else every / steps)))


def _require(name: str, value: str, expected: str, *allowed: str) -> None:
    if value not in allowed:
        raise RecipeInvalid(f"{name}: expected {expected}; got {value!r}")
