"""`env-server TASK evaluate`: evaluates the served policy once."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import structlog

from grpo_core.evaluation.files import save
from grpo_core.evaluation.table import table_lines
from grpo_core.rollouts.of_group import records_of_group
from grpo_core.rollouts.page import write_page
from grpo_core.rollouts.record import RolloutRecord
from grpo_core.security.bearer_token import plain
from grpo_env.assembly import TaskSet, open_engine, sampling_plan
from grpo_env.config.settings import EnvServerSettings
from grpo_env.evaluation.runner import Evaluation, evaluate
from grpo_env.inference.wait_for_servers import wait_for_servers
from grpo_env.rollout.chat_template import TokenizerTemplate
from grpo_env.rollout.outcome import Rollout, RolloutFailure

log = structlog.get_logger()

PROGRESS = "evaluation.progress"
PROGRESS_EVERY_S = 5.0
DEFAULT_OUTPUT = Path("eval.jsonl")


async def evaluate_once(
    settings: EnvServerSettings, tasks: TaskSet, template: TokenizerTemplate
) -> None:
    """Print a table for each task, append the results to `--eval-output`, and write a page with
    answers and their grades.

    Raises:
        GrpoError: the evaluation cannot be done.
    """
    evaluation = Evaluation.of(settings)
    chosen = [(task, evaluation.chosen(task)) for task in tasks.tasks]
    output = settings.eval_output or DEFAULT_OUTPUT
    api_key = plain(settings.vllm_api_key)
    await wait_for_servers(settings.inference_url, settings.start_deadline_s, api_key)
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

    def add(self, outcome: Rollout | RolloutFailure) -> None:
        if outcome.group is not None:
            self.records += records_of_group(1, self._done, outcome.group.without_padding())
        self._done += 1
        now = time.monotonic()
        if now - self._told < PROGRESS_EVERY_S:
            return
        self._told = now
        left_s = (now - self._started) / self._done * (self._items - self._done)
        log.info(
            PROGRESS, task=self._task, done=self._done, items=self._items, left_s=round(left_s)
        )
