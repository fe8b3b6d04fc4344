"""Evaluates the policy on items that training never uses: once, or beside the training."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from grpo_core.errors import GrpoError, ServiceUnavailable
from grpo_core.evaluation.results import EvalItem, EvalResult, save
from grpo_core.evaluation.tables import table_lines
from grpo_core.rollouts.files import EVALUATION
from grpo_core.rollouts.page.write import write_page
from grpo_core.rollouts.record import RolloutRecord, records_of_group
from grpo_core.wire.policy_version import PolicyVersion
from grpo_env.assembly import TaskSet, open_engine, sampling_plan
from grpo_env.inference.pool import InferencePool
from grpo_env.inference.waiting import wait_for_step
from grpo_env.rollout.chat_template import ChatTemplate
from grpo_env.rollout.engine import RolloutEngine, all_or_none
from grpo_env.rollout.groups import FailureReason, GroupLost, SampledGroup, SamplingPlan
from grpo_env.rollout.untrained import KEPT_GROUPS, UntrainedRollouts
from grpo_env.settings import EnvServerSettings
from grpo_env.tasks import Task
from grpo_env.tasks.data_files import DataUnusable
from grpo_env.tasks.items import Item, evaluation_items

log = structlog.get_logger()

PROGRESS = "evaluation.progress"
PROGRESS_EVERY_S = 5.0
DEFAULT_OUTPUT = Path("eval.jsonl")


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation samples.

    items: at most this number for each task
    samples: answers to each item
    temperature: 0 for the most likely tokens
    requests: largest number of items that are sampled at the same time
    reshaping: as in `SamplingPlan`
    ks: of `pass@k` and `mean@k`; empty means 1 and the number of samples
    """

    items: int
    samples: int
    temperature: float
    requests: int
    seed: int
    reshaping: Mapping[str, float] = field(default_factory=dict)
    ks: tuple[int, ...] = ()

    @classmethod
    def of(cls, settings: EnvServerSettings) -> Evaluation:
        given = settings.eval_temperature
        temperature = settings.temperature if given is None else given
        return cls(
            items=settings.eval_items,
            samples=1 if temperature == 0 else settings.eval_samples,
            temperature=temperature,
            requests=settings.eval_requests,
            seed=settings.seed,
        )

    def plan(self, training: SamplingPlan) -> SamplingPlan:
        """How to sample, with the limits of training."""
        return replace(
            training,
            group_size=self.samples,
            temperature=self.temperature,
            reshaping=self.reshaping,
            drop_equal_scores=False,
            asks_teacher=False,
            start_completion_tokens=None,
        )

    def chosen(self, task: Task) -> list[Item]:
        """The items of a task, the same ones in every evaluation with this seed. Raises
        `DataUnusable`: there are no items that training does not use."""
        items = evaluation_items(task)
        if len(items) <= self.items:
            return items
        return random.Random(self.seed).sample(items, self.items)


async def evaluate(
    engine: RolloutEngine,
    task: Task,
    items: Sequence[Item],
    evaluation: Evaluation,
    training: SamplingPlan,
    model: str | None = None,
    seen: Callable[[Item, SampledGroup], None] = lambda _item, _group: None,
) -> EvalResult:
    """Sample and grade all items of one task.

    An item whose answers cannot be sampled or graded is left out and counted.

    Args: seen: is called with each item and what it gave

    Raises:
        NothingEvaluated: no item could be evaluated.
        ServiceUnavailable: the server failed before any item was evaluated.
        ProtocolViolation, MisalignedCompletion: an answer of the server is not valid.
    """
    started, plan = time.monotonic(), evaluation.plan(training)
    places = asyncio.Semaphore(evaluation.requests)
    found: list[EvalItem] = []
    versions: list[tuple[PolicyVersion, PolicyVersion]] = []
    left_out: Counter[str] = Counter()
    detail = ""

    async def add(item: Item) -> None:
        nonlocal detail
        async with places:
            try:
                sampled = await engine.roll_out(item, plan)
            except ServiceUnavailable as error:
                if not found:  # the server is gone: do not wait for it once for each item
                    raise
                sampled = SampledGroup(lost=GroupLost(FailureReason.UNAVAILABLE, str(error)))
            seen(item, sampled)
        if len(sampled.grades) == plan.group_size:
            found.append(
                EvalItem(
                    task=task.name,
                    item=item.key,
                    rewards=tuple(grade.score for grade in sampled.grades),
                    parts=tuple(dict(grade.parts) for grade in sampled.grades),
                    lengths=tuple(sampled.completion_lengths),
                    truncated=tuple(not answer.finished for answer in sampled.answers),
                )
            )
            versions.extend(sampled.policy_versions)
            return
        assert sampled.lost is not None
        reason, detail = sampled.lost.reason.value, sampled.lost.detail
        left_out[reason] += 1
        log.warning(
            "evaluation.item_lost", task=task.name, item=item.key, reason=reason, detail=detail
        )

    await all_or_none(add(item) for item in items)
    by_version = Counter(
        str(first) if first == last else f"{first} to {last}" for first, last in sorted(versions)
    )
    if len(by_version) > 1:
        log.info("evaluation.versions_differ", task=task.name, answers=dict(by_version))
    every = [version for pair in versions for version in pair]
    return EvalResult.of(
        sorted(found, key=lambda item: item.item),
        task=task.name,
        temperature=evaluation.temperature,
        duration_s=time.monotonic() - started,
        ks=evaluation.ks,
        model=model,
        step=min(every).step if every else None,
        versions=(min(every), max(every)) if every else None,
        answers_by_version=by_version,
        left_out=left_out,
        last_failure=detail,
        seed=evaluation.seed,
    )


async def evaluate_once(
    settings: EnvServerSettings, tasks: TaskSet, template: ChatTemplate
) -> None:
    """Print a table for each task, append the results to `--eval-output`, and write a page with
    answers and their grades. Raises `GrpoError`: the evaluation cannot be done."""
    evaluation = Evaluation.of(settings)
    chosen = [(task, evaluation.chosen(task)) for task in tasks.tasks]
    output = settings.eval_output or DEFAULT_OUTPUT
    without_teacher = settings.model_copy(update={"teacher_url": None})
    async with open_engine(without_teacher, tasks, template) as (engine, pool):
        if len(pool.places) > 1:  # one server has one version, and nothing is waited for
            engine = await _of_one_version(engine, pool, 0)
        plan = sampling_plan(settings, tasks)
        for task, items in chosen:
            answers = _Answers(task.name, len(items))
            result = await evaluate(
                engine, task, items, evaluation, plan, settings.model, answers.add
            )
            details = save(result, output, Path(settings.model or "").name)
            page = details.with_suffix(".html")
            facts = {"task": task.name, "model": settings.model or ""}
            title = f"Answers to {task.name}"
            write_page(page, title, answers.records, {}, template.pieces, facts)
            sys.stdout.write("\n".join(table_lines(result)) + "\n")
            sys.stdout.write(f"written to {output} and {details}\nanswers:   {page}\n")
            sys.stdout.flush()


async def _of_one_version(engine: RolloutEngine, pool: InferencePool, step: int) -> RolloutEngine:
    """The engine on the servers that have the newest version now, which is that of `step` or a
    later one. If all of them are gone, the others answer.

    Raises:
        ServiceUnavailable: as `wait_for_step`.
    """
    newest = await wait_for_step(pool, step)
    return replace(engine, generate=partial(pool.generate, only=newest))


class _Answers:
    """The answers to the items of a task, for the page. Logs how far the evaluation is.

    Args: items: their number
    """

    def __init__(self, task: str, items: int) -> None:
        self._task, self._items = task, items
        self._done = 0
        self._started = self._told = time.monotonic()
        self.records: list[RolloutRecord] = []

    def add(self, _: Item, sampled: SampledGroup) -> None:
        if sampled.group is not None:
            self.records += records_of_group(1, self._done, sampled.group.without_padding())
        self._done += 1
        now = time.monotonic()
        if now - self._told < PROGRESS_EVERY_S:
            return
        self._told = now
        left_s = (now - self._started) / self._done * (self._items - self._done)
        log.info(
            PROGRESS, task=self._task, done=self._done, items=self._items, left_s=round(left_s)
        )


@dataclass(eq=False)
class TrainingEvaluation:
    """The evaluations of one run.

    An evaluation never ends the run: if it fails, the failure is logged.

    Args:
        report: called with the step and the metrics of each evaluation
        untrained: keeps some of the answers
    """

    settings: EnvServerSettings
    tasks: tuple[Task, ...]
    engine: RolloutEngine
    pool: InferencePool
    report: Callable[[int, Mapping[str, Any]], None]
    untrained: UntrainedRollouts

    def __post_init__(self) -> None:
        self._evaluation = Evaluation.of(self.settings)
        self._items: list[tuple[Task, list[Item]]] = []
        for task in self.tasks if self.settings.eval_every else ():
            try:
                self._items.append((task, self._evaluation.chosen(task)))
            except DataUnusable as error:
                log.warning("evaluation.left_out", task=task.name, reason=str(error))
        self._kept_items = {item.key for _, items in self._items for item in items[:KEPT_GROUPS]}
        self._done_up_to = self._evaluated_step = -1
        self._running: asyncio.Task[None] | None = None
        self._samples = False
        self._seen_items = 0
        self._kept: list[SampledGroup] = []

    @property
    def is_running(self) -> bool:
        return self._running is not None and not self._running.done()

    @property
    def report_fields(self) -> Mapping[str, str]:
        """How far the running evaluation is; empty without one."""
        if not (self.is_running and self._samples):
            return {}
        return {"evaluated": f"{self._seen_items}/{sum(len(items) for _, items in self._items)}"}

    @property
    def groups_for_training(self) -> int:
        """Largest number of groups that may be sampled for training now."""
        most = self.settings.max_concurrent_groups
        if not self._samples or self.settings.eval_handling == "NONE":
            return most
        if self.settings.eval_handling == "STOP_TRAIN":
            return 0
        return int(most * self.settings.eval_limit_ratio)

    def start_if_due(self, step: int, plan: SamplingPlan) -> None:
        """Start an evaluation at the first step seen, and at each multiple of `--eval-every`."""
        every = self.settings.eval_every
        if not self._items or self.is_running:
            return
        if self._done_up_to < 0 or step // every > self._done_up_to // every:
            self._start(step, plan)

    async def finish(self, step: int, plan: SamplingPlan) -> None:
        """Evaluate the policy of the last step."""
        if not self._items:
            return
        if self._running is not None:
            await self._running
        if self._evaluated_step < step:
            await self._start(step, plan)

    async def cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def _start(self, step: int, plan: SamplingPlan) -> asyncio.Task[None]:
        # The first policy is served already. Later, the trainer may need groups to reach the step.
        self._samples = self._done_up_to < 0
        self._done_up_to = step
        self._running = asyncio.create_task(self._run(step, plan))
        return self._running

    async def _run(self, step: int, plan: SamplingPlan) -> None:
        try:
            engine = await _of_one_version(self.engine, self.pool, step)
            self._samples, self._seen_items, self._kept = True, 0, []
            for task, items in self._items:
                result = await evaluate(
                    engine, task, items, self._evaluation, plan, seen=self._see_item
                )
                self._record(result)
            at = max(0, self._evaluated_step)
            await asyncio.to_thread(self.untrained.save, EVALUATION, at, self._kept)
        except GrpoError as error:
            log.warning("evaluation.failed", step=step, error=f"{type(error).__name__}: {error}")
        finally:
            self._samples = False

    def _see_item(self, item: Item, sampled: SampledGroup) -> None:
        self._seen_items += 1
        if item.key in self._kept_items:
            self._kept.append(sampled)

    def _record(self, result: EvalResult) -> None:
        self._evaluated_step = -1 if result.step is None else result.step
        log.info(
            "evaluation.finished",
            task=result.task,
            step=result.step,
            items=result.item_count,
            samples=result.samples,
            seconds=round(result.duration_s, 3),
            **{name: round(value, 4) for name, value in result.metrics.items()},
        )
        if self.settings.eval_output is not None:
            save(result, self.settings.eval_output)
        self.report(result.step or 0, result.flat())
