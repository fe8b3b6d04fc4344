"""The data of an iteration: the items that it samples, the batches of its optimizer steps, and the
queue that hands them to the trainer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise

import torch

from grpo_core.clients.run_api import LeasedBatch
from grpo_core.tree.objectives import Objective
from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.run_api import Registration, RunStatus
from grpo_core.wire.scored_group import OWN_LOGPROBS, ScoredGroup
from grpo_env.assembly import TaskSet
from grpo_env.pacing import RolloutsFail
from grpo_env.tasks import Task
from grpo_env.tasks.data_files import DataUnusable
from grpo_env.tasks.items import Item, all_items, evaluation_items, training_items
from grpo_runs.offline.errors import KeysInvalid
from grpo_runs.offline.keys import OfflineKeys
from grpo_trainer.advantages import group_advantages
from grpo_trainer.data.collate import Batch
from grpo_trainer.data.groups import GroupLimits, UsableSequence, sequences_of
from grpo_trainer.learner import Learner
from grpo_trainer.model.policy import device_of

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
        here = [one for one in ids if isinstance(one, int) or one in by_key]
        chosen = (items[one % len(items)] if isinstance(one, int) else by_key[one] for one in here)
        known.update(here)
        if here:
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


_OF_GROUPS = ("group_std", "group_mean", "leave_one_out")
"""Advantages that follow from a group alone. Others, and the user's own, see all groups of a step.
"""


def optimizer_batches(
    groups: Sequence[ScoredGroup], steps: int, objective: Objective, limits: GroupLimits
) -> list[list[ScoredGroup]]:
    """Batches of nearly equal numbers of sequences, in order.

    Advantages follow from whole groups: a group that two batches share carries its advantages
    along. Token weights follow from the batch that a sequence lands in.

    Args:
        groups: without padding
        steps: number of batches
    Raises:
        KeysInvalid: a group would be shared, but the objective needs whole ones.
    """
    ends = [*accumulate((group.size for group in groups), initial=0)]
    cuts = [round(number * ends[-1] / steps) for number in range(steps + 1)]
    if not {*cuts} <= {*ends}:
        is_of_groups = objective.advantage in _OF_GROUPS
        if not is_of_groups or (objective.kl_coef and objective.kl_in == "reward"):
            raise KeysInvalid(
                "this objective needs whole groups in each optimizer step: make train.batch_size "
                "times train.grad_accum_steps a multiple of data.rollouts_per_problem"
            )
        groups = _with_advantages(groups, objective, limits)
    return [[*_between(groups, ends, *cut)] for cut in pairwise(cuts)]


def _with_advantages(
    groups: Sequence[ScoredGroup], objective: Objective, limits: GroupLimits
) -> list[ScoredGroup]:
    sequences_of(groups, limits)  # raises if a group is unusable
    found = group_advantages(groups, objective)
    return [
        group
        if group.advantages
        else group.model_copy(update={"advantages": [[value] for value in advantages.tolist()]})
        for group, advantages in zip(groups, found, strict=True)
    ]


def _between(
    groups: Sequence[ScoredGroup], ends: Sequence[int], first: int, last: int
) -> Iterator[ScoredGroup]:
    """The sequences `first` to `last` (not included) of all."""
    for group, (begin, end) in zip(groups, pairwise(ends), strict=True):
        kept = range(max(first, begin) - begin, min(last, end) - begin)
        if len(kept) == group.size:
            yield group
        elif kept:
            yield group.with_sequences(kept)


@torch.no_grad()
def with_own_logprobs(
    groups: Sequence[ScoredGroup],
    learner: Learner,
    collate: Callable[[Sequence[UsableSequence]], Batch],
    limits: GroupLimits,
) -> list[ScoredGroup]:
    """The groups with the policy's logprobs of their tokens at the sampling temperature.

    Call it before the iteration's first optimizer step: later steps then have importance ratios,
    and their clipping.
    """
    batch = collate(sequences_of(groups, limits))
    found: list[list[float]] = []
    for micro in batch.micro_batches:
        values = learner.forward(learner.policy, micro.to(device_of(learner.policy)))
        logp = values.logp.cpu()  # [B, T]
        found += [row[:length].tolist() for row, length in zip(logp, micro.lengths, strict=True)]
    in_order = (row for _, row in sorted(zip(batch.order, found, strict=True)))
    done: list[ScoredGroup] = []
    for group in groups:
        pairs = zip(islice(in_order, group.size), group.masks, strict=True)
        logprobs = [_aligned(*pair) for pair in pairs]
        facts = {**(group.group_overrides or {}), OWN_LOGPROBS: True}
        changes = {"inference_logprobs": logprobs, "group_overrides": facts}
        done.append(group.model_copy(update=changes))
    return done


def _aligned(logp: Sequence[float], masks: Sequence[int]) -> list[float]:
    """[T] Args: logp: of the tokens after the first, as far as they are trained on; masks: [T]"""
    padded = [PROMPT_LOGPROB, *logp, *[PROMPT_LOGPROB] * (len(masks) - 1 - len(logp))]
    return [
        PROMPT_LOGPROB if mask == MASKED else value
        for mask, value in zip(masks, padded, strict=True)
    ]


RUN_UUID = "offline"
"""The trainer's checkpoints name the run that their batches came from. Here each directory holds
one run."""


class InProcessQueue:
    """A `BatchQueue`. Batches are numbered as the optimizer steps are: the first one is 1."""

    base_url = "in this process"
    run_uuid = RUN_UUID

    def __init__(self) -> None:
        self._batches: deque[list[ScoredGroup]] = deque()
        self._handed_out = 0

    def put(self, batches: Sequence[list[ScoredGroup]]) -> None:
        self._batches.extend(batches)

    def status(self) -> RunStatus:
        return RunStatus(current_step=self._handed_out, queue_size=0, run_uuid=RUN_UUID)

    def register(self, registration: Registration) -> int:  # noqa: ARG002
        return 0

    def resume_after(self, batch_id: int) -> None:
        self._handed_out = batch_id

    def poll(
        self,
        wait_s: float = 0.0,  # noqa: ARG002
        batches_left: int | None = None,  # noqa: ARG002
    ) -> LeasedBatch:
        if not self._batches:
            raise RolloutsFail(
                "the trainer cannot train on a batch of this iteration and has no other one; the "
                "log names the reason, and the directory quarantine/ of the run holds the batch. "
                "To sample the iteration again, delete its file below sampled/ and resume"
            )
        groups = self._batches.popleft()
        self._handed_out += 1
        return LeasedBatch(self._handed_out, groups, [None] * len(groups))

    def request_ahead(
        self,
        batches_left: int,
        prepare: Callable[[LeasedBatch], None] = lambda _: None,
    ) -> None:
        """Nothing waits ahead: the next batch may be sampled from the next weights."""

    def acknowledge(self, batch_id: int) -> None:
        """Nothing is kept."""
