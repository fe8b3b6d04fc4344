"""Actions of `env-server` that need no trainer: `process` samples groups to a file, and `evaluate`
evaluates the served policy once.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import fmean

import structlog

from grpo_core.errors import GrpoError
from grpo_core.evaluation.results import save
from grpo_core.evaluation.tables import table_lines
from grpo_core.rollouts.page import write_page
from grpo_core.rollouts.record import RolloutRecord, records_of_group
from grpo_env.assembly import TaskSet, open_engine, sampling_plan
from grpo_env.evaluation import Evaluation, evaluate
from grpo_env.rollout.chat_template import ChatTemplate
from grpo_env.rollout.engine import RolloutEngine
from grpo_env.rollout.groups import SampledGroup
from grpo_env.settings import EnvServerSettings
from grpo_env.tasks.items import Item, ItemStream

log = structlog.get_logger()

DEFAULT_GROUPS = 16


class NothingProcessed(GrpoError):
    """No group could be sampled and graded."""


async def process(settings: EnvServerSettings, tasks: TaskSet, template: ChatTemplate) -> None:
    """Write `--steps` groups to `--output`, one JSON object per line, and a page beside it.

    Groups of equal scores are written too, because they show why nothing would be learned.

    Raises:
        GrpoError: a server does not answer, or no group could be graded.
    """
    groups = settings.steps if settings.steps > 0 else DEFAULT_GROUPS
    stream = tasks.training_stream(settings.seed)
    records: list[RolloutRecord] = []
    lost: Counter[str] = Counter()
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    with settings.output.open("w", encoding="utf-8") as file:
        async with open_engine(settings, tasks, template) as engine:
            async for sampled in _sampled(settings, tasks, engine, groups, stream):
                if sampled.group is None:
                    assert sampled.lost is not None
                    reason = sampled.lost.reason.value
                    lost[reason] += 1
                    log.warning("group.lost", reason=reason, detail=sampled.lost.detail)
                    continue
                file.write(sampled.group.model_dump_json(exclude_none=True) + "\n")
                number = len({record.group for record in records})
                records += records_of_group(1, number, sampled.group.without_padding())
    if not records:
        raise NothingProcessed(
            f"none of {groups} groups could be used ({_counted(lost)}); the log names the reasons"
        )
    page = settings.output.with_suffix(".html")
    facts = {"task": settings.display_name, "model": settings.model or ""}
    write_page(page, f"Rollouts of {settings.display_name}", records, {}, template.pieces, facts)
    _print_summary(records, lost, settings.output, page)


async def _sampled(
    settings: EnvServerSettings,
    tasks: TaskSet,
    engine: RolloutEngine,
    groups: int,
    stream: ItemStream,
) -> AsyncIterator[SampledGroup]:
    plan = sampling_plan(settings, tasks)
    places = asyncio.Semaphore(settings.max_concurrent_groups)

    async def one(item: Item) -> SampledGroup:
        async with places:
            return await engine.roll_out(item, plan)

    work = [asyncio.create_task(one(stream.next())) for _ in range(groups)]
    try:
        for done in asyncio.as_completed(work):
            yield await done
    finally:
        for task in work:
            task.cancel()


def _print_summary(
    records: list[RolloutRecord], lost: Counter[str], output: Path, page: Path
) -> None:
    scores = [record.score for record in records]
    groups: dict[int, set[float]] = {}
    for record in records:
        groups.setdefault(record.group, set()).add(record.score)
    equal = sum(len(found) == 1 for found in groups.values())
    lines = [
        f"{len(groups)} groups, mean score {fmean(scores):.3f}, "
        f"{equal} of them with equal scores (training drops these)",
        *([f"lost: {_counted(lost)}"] if lost else []),
        f"groups: {output}",
        f"page:   {page}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def _counted(lost: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(lost.items()))


PROGRESS = "evaluation.progress"
PROGRESS_EVERY_S = 5.0
DEFAULT_OUTPUT = Path("eval.jsonl")


async def evaluate_once(
    settings: EnvServerSettings, tasks: TaskSet, template: ChatTemplate
) -> None:
    """Print a table for each task, append the results to `--eval-output`, and write a page with
    answers and their grades.

    Raises:
        GrpoError: the evaluation cannot be done.
    """
    evaluation = Evaluation.of(settings)
    chosen = [(task, evaluation.chosen(task)) for task in tasks.tasks]
    output = settings.eval_output or DEFAULT_OUTPUT
    async with open_engine(settings, tasks, template) as engine:
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


class _Answers:
    """The answers to the items of a task, for the page. Logs how far the evaluation is.

    Args: items: their number
    """

    def __init__(self, task: str, items: int) -> None:
        self._task, self._items = task, items
        self._done = 0
        self._started = self._told = time.monotonic()
        self.records: list[RolloutRecord] = []

    def add(self, sampled: SampledGroup) -> None:
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
