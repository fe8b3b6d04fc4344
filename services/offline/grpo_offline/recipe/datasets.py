"""The data sets of a recipe: which rows are trained on, and which are evaluated."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from grpo_env.tasks import Row, Split
from grpo_env.tasks.data_files import DataUnusable, read_records
from grpo_env.tasks.rows import checked_rows


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

    def as_arguments(self) -> dict[str, Any]:
        return asdict(self)

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
