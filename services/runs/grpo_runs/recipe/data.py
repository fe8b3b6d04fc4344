"""The data and the rewards of a recipe, as options of `env-server`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, field, replace
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, field_validator
from pydantic.dataclasses import dataclass

from grpo_core.errors import problems_of
from grpo_core.settings import Mistake
from grpo_env.tasks import Row, Split
from grpo_env.tasks.data_files import DataUnusable, is_file_name, read_records
from grpo_env.tasks.rows import ANSWER, checked_rows
from grpo_runs.recipe.keys import TrainingRecipe

TASK = "grpo_runs.recipe.task:RecipeTask"
Found = Iterator[tuple[str, Any] | Mistake]
"""Keys of the offline trainer with their values, and mistakes."""
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_STRICT)
class DatasetConfig:
    """One data set.

    Args:
        id: a file, a directory, or an id on the hub
        config: its configuration on the hub
        columns: those that are kept; None: all
        weight: share of the rows that is taken. It is no sampling probability: the rows that are
            taken count equally
    """

    id: str
    config: str | None = None
    split: str = "train"
    columns: list[str] | None = None
    weight: Annotated[float, Field(gt=0, le=1)] | None = None


@dataclass(frozen=True, config=_STRICT)
class DatasetMixtureConfig:
    """Several data sets, whose rows are trained on together.

    Args:
        seed: decides which rows of a data set with a weight below 1 are taken
        test_split_size: share of the rows that is kept for evaluation
    """

    datasets: Annotated[list[DatasetConfig], Field(min_length=1)]
    seed: int = 0
    test_split_size: Annotated[float, Field(gt=0, lt=1)] | None = None

    @field_validator("datasets")
    @classmethod
    def _require_equal_columns(cls, datasets: list[DatasetConfig]) -> list[DatasetConfig]:
        named = {tuple(sorted(one.columns)) for one in datasets if one.columns is not None}
        if len(named) > 1:
            raise ValueError(f"columns must be the same in each; got {sorted(named)}")
        return datasets


@dataclass(frozen=True, config=_STRICT)
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
    columns: dict[str, str] = field(default_factory=dict)
    test_columns: dict[str, str] = field(default_factory=dict)

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


def environment_options(recipe: TrainingRecipe) -> Found:
    """The task, its data and rewards, and what is kept for evaluation."""
    mixture = _mixture_of(recipe)
    names, weights = recipe["reward_funcs"], recipe["reward_weights"] or []
    if recipe["reward_weights"] is None:
        weights = [1.0] * len(names)
    elif len(weights) != len(names):
        text = f"{len(weights)} weights for the {len(names)} names of reward_funcs"
        yield Mistake("reward_weights", text)
    yield "data.task", TASK
    yield "env_server.reward_weights", dict(zip(names, weights, strict=False))
    if recipe["max_prompt_length"] is not None:
        # A sequence as long as the limit is dropped.
        longest = recipe["max_prompt_length"] + (recipe["max_completion_length"] or 0) + 1
        yield "grpo.seq_len", longest
        yield "env_server.seq_len", longest
    if isinstance(mixture, Mistake):
        yield mixture
        return
    stop = recipe["vllm_stop_sequences"] or []
    data = asdict(_data_of(recipe, mixture))
    yield "env_server.task_args", {"data": data, "rewards": names, "stop": stop}
    if mixture.test_split_size is not None:
        yield "env_server.held_out", mixture.test_split_size
    elif recipe["eval_strategy"] == "no":
        yield "env_server.held_out", 0.0


def _mixture_of(recipe: TrainingRecipe) -> DatasetMixtureConfig | Mistake:
    name, mixture = recipe["dataset_name"], recipe["dataset_mixture"]
    if mixture is None and name is None:
        return Mistake("dataset_name", "it or dataset_mixture is required")
    if mixture is None:
        keys = ("dataset_name", "dataset_config", "dataset_train_split", "columns")
        return DatasetMixtureConfig([DatasetConfig(*(recipe[key] for key in keys))])
    if name is not None or recipe.given.keys() & {"dataset_config", "columns"}:
        return Mistake(
            "dataset_mixture",
            "excludes dataset_name, dataset_config and columns; name them in its list `datasets`",
        )
    try:
        return DatasetMixtureConfig(**mixture)
    except ValidationError as error:
        return Mistake("dataset_mixture", problems_of(error))


def _data_of(recipe: TrainingRecipe, mixture: DatasetMixtureConfig) -> RecipeData:
    columns = _columns(recipe["dataset_prompt_column"], recipe["dataset_solution_column"])
    data = RecipeData(mixture.datasets, mixture.seed, columns=columns, test_columns=columns)
    if recipe["eval_strategy"] == "no":
        return data
    if recipe["eval_dataset_name"] is not None:
        name, split = recipe["eval_dataset_name"], recipe["eval_dataset_split"]
        if is_file_name(name) and "eval_dataset_split" not in recipe.given:
            split = "train"  # the only one that a file has
        test = DatasetConfig(name, recipe["eval_dataset_config"], split)
        own = _columns(recipe["eval_dataset_prompt_column"], recipe["eval_dataset_solution_column"])
        return replace(data, test=test, test_columns={**columns, **own})
    if recipe["dataset_mixture"] is not None or is_file_name(mixture.datasets[0].id):
        return data
    own_test = replace(mixture.datasets[0], split=recipe["dataset_test_split"])
    return replace(data, test=own_test, may_lack_test="dataset_test_split" not in recipe.given)


def _columns(prompt: str | None, solution: str | None) -> dict[str, str]:
    named = {"prompt": prompt, ANSWER: solution}
    return {ours: theirs for ours, theirs in named.items() if theirs is not None}
