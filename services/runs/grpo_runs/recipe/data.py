"""The data and the rewards of a recipe, as options of `env-server`."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from grpo_env.tasks import Row, Split
from grpo_env.tasks.data_files import DataUnusable, is_file_name, read_records
from grpo_env.tasks.rows import ANSWER, checked_rows
from grpo_runs.offline.errors import RecipeInvalid
from grpo_runs.recipe.reading import TrainingRecipe


@dataclass(frozen=True)
class DatasetConfig:
    """One data set.

    Args:
        id: a file, a directory, or an id on the hub
        config: its configuration on the hub
        columns: those that are kept; None: all
        weight: share of the rows that is taken, above 0 and at most 1. It is no sampling
            probability: the rows that are taken count equally
    """

    id: str
    config: str | None = None
    split: str = "train"
    columns: list[str] | None = None
    weight: float | None = None

    def __post_init__(self) -> None:
        if self.weight is not None and not 0 < self.weight <= 1:
            raise ValueError(f"{self.id}: weight is {self.weight}; expected above 0, at most 1")


@dataclass(frozen=True)
class DatasetMixtureConfig:
    """Several data sets, whose rows are trained on together.

    Args:
        seed: decides which rows of a data set with a weight below 1 are taken
        test_split_size: share of the rows that is kept for evaluation
    """

    datasets: list[DatasetConfig]
    seed: int = 0
    test_split_size: float | None = None

    def __post_init__(self) -> None:
        if self.test_split_size is not None and not 0 < self.test_split_size < 1:
            raise ValueError("test_split_size: expected above 0 and below 1")
        named = {tuple(sorted(one.columns)) for one in self.datasets if one.columns is not None}
        if len(named) > 1:
            raise ValueError(
                f"columns: the data sets of a mixture must have the same; got {sorted(named)}"
            )

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> DatasetMixtureConfig:
        """Raises `ValueError`: a key is unknown or missing."""
        found = content.get("datasets")
        if not isinstance(found, list) or not found:
            raise ValueError("dataset_mixture: expected a list `datasets`")
        try:
            datasets = [DatasetConfig(**one) for one in found]
            return cls(**{**content, "datasets": datasets})
        except TypeError as error:
            raise ValueError(f"dataset_mixture: {str(error).partition('__init__() ')[2]}") from None


@dataclass(frozen=True)
class RecipeData:
    """What a recipe says of its data, as the task's arguments hold it.

    Args:
        test: rows of evaluation; None: a share of those of training
        may_lack_test: whether `test` may be a split that the data set does not have
    """

    train: list[DatasetConfig]
    seed: int = 0
    test: DatasetConfig | None = None
    may_lack_test: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    test_columns: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_arguments(cls, content: Mapping[str, Any]) -> RecipeData:
        test = content.get("test")
        return cls(
            **{
                **content,
                "train": [DatasetConfig(**one) for one in content["train"]],
                "test": DatasetConfig(**test) if test else None,
            }
        )

    def rows(self, split: Split) -> Sequence[Row] | None:
        """Raises `DataUnusable`: there are no such rows."""
        if split == "train":
            return [row for one in self.train for row in _rows(one, self.columns, self.seed)]
        if self.test is None:
            return None
        try:
            return _rows(self.test, self.test_columns, self.seed)
        except DataUnusable:
            if self.may_lack_test:
                return None
            raise


def _rows(source: DatasetConfig, columns: Mapping[str, str], seed: int) -> list[Row]:
    records, name = read_records(source.id, source.config, source.split)
    rows: list[Row] = checked_rows(records, name, columns)
    if source.weight is not None and source.weight < 1:
        count = max(1, int(len(rows) * source.weight))
        rows = random.Random(seed).sample(rows, count)
    if source.columns is None:
        return rows
    kept = {*source.columns, *columns}
    missing = [name for name in source.columns if name not in rows[0]]
    if missing:
        raise DataUnusable(
            f"{name}: columns: no column {', '.join(missing)}; there are {', '.join(rows[0])}"
        )
    return [{key: value for key, value in row.items() if key in kept} for row in rows]


def _mixture_of(recipe: TrainingRecipe) -> DatasetMixtureConfig:
    """Raises `RecipeInvalid`: the recipe names no data, or too much."""
    if recipe["dataset_mixture"] is not None:
        if recipe["dataset_name"] is not None or recipe.gives("dataset_config", "columns"):
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
    names = ("dataset_name", "dataset_config", "dataset_train_split", "columns")
    return DatasetMixtureConfig([DatasetConfig(*(recipe[name] for name in names))])


def _data_of(recipe: TrainingRecipe, mixture: DatasetMixtureConfig) -> RecipeData:
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


def _columns(prompt: str | None, solution: str | None) -> dict[str, str]:
    named = {"prompt": prompt, ANSWER: solution}
    return {ours: theirs for ours, theirs in named.items() if theirs is not None}


def environment_options(recipe: TrainingRecipe) -> dict[str, Any]:
    """Raises `RecipeInvalid`: the recipe names no data, or too much, or too few weights."""
    mixture = _mixture_of(recipe)
    arguments = {
        "data": asdict(_data_of(recipe, mixture)),
        "rewards": recipe["reward_funcs"],
        "stop": recipe["vllm_stop_sequences"] or [],
    }
    options: dict[str, Any] = {"task_args": arguments, "reward_weights": _weights(recipe)}
    options |= lengths(recipe)
    if recipe["system_prompt"] is not None:
        options["system_prompt"] = recipe["system_prompt"]
    if recipe["chat_template_kwargs"]:
        options["template_args"] = recipe["chat_template_kwargs"]
    if mixture.test_split_size is not None:
        options["held_out"] = mixture.test_split_size
    elif recipe["eval_strategy"] == "no":
        options["held_out"] = 0.0
    return options


def lengths(recipe: TrainingRecipe) -> dict[str, Any]:
    """Options of both commands for `max_prompt_length`."""
    if recipe["max_prompt_length"] is None:
        return {}
    # A sequence as long as the limit is dropped.
    return {"seq_len": recipe["max_prompt_length"] + recipe["max_completion_length"] + 1}


def _weights(recipe: TrainingRecipe) -> dict[str, float]:
    names, weights = recipe["reward_funcs"], recipe["reward_weights"]
    if weights is None:
        return dict.fromkeys(names, 1.0)
    if len(weights) != len(names):
        raise RecipeInvalid(
            f"reward_weights: {len(weights)} weights for the {len(names)} names of reward_funcs"
        )
    return dict(zip(names, weights, strict=True))
