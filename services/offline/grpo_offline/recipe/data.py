"""The data of a recipe, made of its keys."""

from __future__ import annotations

from dataclasses import replace

from grpo_env.tasks.data_files import is_file_name
from grpo_env.tasks.rows import ANSWER
from grpo_offline.errors import RecipeInvalid
from grpo_offline.recipe.datasets import DatasetConfig, DatasetMixtureConfig, RecipeData
from grpo_offline.recipe.reading import Recipe

_PROMPT = "prompt"
_SINGLE = ("dataset_config", "columns")


def mixture_of(recipe: Recipe) -> DatasetMixtureConfig:
    """Raises `RecipeInvalid`: the recipe names no data, or too much."""
    if recipe["dataset_mixture"] is not None:
        if recipe["dataset_name"] is not None or recipe.gives(*_SINGLE):
            raise RecipeInvalid(
                "dataset_mixture: excludes dataset_name, dataset_config and columns; name them in "
                "its list `datasets`"
            )
        try:
            return DatasetMixtureConfig.read(recipe["dataset_mixture"])
        except ValueError as error:
            raise RecipeInvalid(str(error)) from error
    if recipe["dataset_name"] is None:
        raise RecipeInvalid("dataset_name or dataset_mixture is required")
    return DatasetMixtureConfig(
        [
            DatasetConfig(
                recipe["dataset_name"],
                recipe["dataset_config"],
                recipe["dataset_train_split"],
                recipe["columns"],
            )
        ]
    )


def data_of(recipe: Recipe) -> RecipeData:
    """Raises `RecipeInvalid`: the recipe names no data, or too much."""
    mixture = mixture_of(recipe)
    columns = _columns(recipe["dataset_prompt_column"], recipe["dataset_solution_column"])
    data = RecipeData(mixture.datasets, mixture.seed, columns=columns, test_columns=columns)
    if recipe["eval_strategy"] == "no":
        return data
    if recipe["eval_dataset_name"] is not None:
        name, split = recipe["eval_dataset_name"], recipe["eval_dataset_split"]
        if is_file_name(name) and not recipe.gives("eval_dataset_split"):
            split = "train"  # the only one that a file has
        test = DatasetConfig(name, recipe["eval_dataset_config"], split)
        own = _columns(recipe["eval_dataset_prompt_column"], recipe["eval_dataset_solution_column"])
        return replace(data, test=test, test_columns={**columns, **own})
    if recipe["dataset_mixture"] is not None or is_file_name(mixture.datasets[0].id):
        return data
    own_test = replace(mixture.datasets[0], split=recipe["dataset_test_split"])
    must_exist = recipe.gives("dataset_test_split")
    return replace(data, test=own_test, may_lack_test=not must_exist)


def held_out(recipe: Recipe) -> float | None:
    """Share of the rows that is kept for evaluation if no other rows are; None: the default."""
    if recipe["dataset_mixture"] is not None:
        share = mixture_of(recipe).test_split_size
        if share is not None:
            return share
    return 0.0 if recipe["eval_strategy"] == "no" else None


def _columns(prompt: str | None, solution: str | None) -> dict[str, str]:
    named = {_PROMPT: prompt, ANSWER: solution}
    return {ours: theirs for ours, theirs in named.items() if theirs is not None}
