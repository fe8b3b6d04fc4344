"""The items of a run: those of its training seeds, and those of its evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_env.assembly import TaskSet
from grpo_env.tasks import Task
from grpo_env.tasks.data_files import DataUnusable
from grpo_env.tasks.items import Item, all_items, evaluation_items, training_items
from grpo_runs.offline.errors import KeysInvalid
from grpo_runs.offline.keys import OfflineKeys

Parts = Sequence[tuple[Sequence[Item], float]]
"""Items and weight of each task, as an `ItemStream` takes them."""


def items_to_train(tasks: TaskSet, keys: OfflineKeys) -> Parts:
    """The items of the training seeds, each once. Seeds past the last item begin with the first one
    again.

    Raises `DataUnusable`: a task has no items."""
    data = keys.data
    seeds = range(data.train_seed_start, data.train_seed_start + data.num_train_seeds)
    return [
        (_of_seeds(training_items(task), seeds), weight)
        for task, weight in zip(tasks.tasks, tasks.weights, strict=True)
    ]


@dataclass(frozen=True)
class EvaluationItems:
    """The items of a task that every evaluation of the run uses."""

    task: Task
    items: tuple[Item, ...]


def items_to_evaluate(tasks: TaskSet, keys: OfflineKeys) -> list[EvaluationItems]:
    """Those of `eval.ids`, else those of `eval.num_ids` seeds among items that are not trained on.

    Raises:
        DataUnusable: a task has no items that training does not use.
        KeysInvalid: eval.ids names an item that no task has.
    """
    if keys.eval.ids:
        return _named(tasks, keys.eval.ids)
    first = keys.eval.id_seed_start
    seeds = range(first, first + keys.eval.num_ids)
    return [
        EvaluationItems(task, tuple(_of_seeds(evaluation_items(task), seeds)))
        for task in tasks.tasks
    ]


def _of_seeds(items: Sequence[Item], seeds: Sequence[int]) -> list[Item]:
    """Each item once."""
    return [items[place] for place in dict.fromkeys(seed % len(items) for seed in seeds)]


def _named(tasks: TaskSet, ids: Sequence[int | str]) -> list[EvaluationItems]:
    found: list[EvaluationItems] = []
    known: set[int | str] = set()
    for task in tasks.tasks:
        items = [*all_items(task), *_test_items(task)]
        by_key = {item.key: item for item in items}
        chosen = [
            items[one % len(items)] if isinstance(one, int) else by_key[one]
            for one in ids
            if isinstance(one, int) or one in by_key
        ]
        known |= {one for one in ids if isinstance(one, int) or one in by_key}
        if chosen:
            found.append(EvaluationItems(task, tuple({item.key: item for item in chosen}.values())))
    if unknown := [str(one) for one in ids if one not in known]:
        raise KeysInvalid(
            f"eval.ids: no item has the key {', '.join(unknown)}; a number is the seed of an item, "
            "and the files below eval/ of a run name the keys of items"
        )
    return found


def _test_items(task: Task) -> list[Item]:
    """Items of evaluation data that is not part of the training data."""
    try:
        return evaluation_items(task) if task.rows("test") is not None else []
    except DataUnusable:
        return []
