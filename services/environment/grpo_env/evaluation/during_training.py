"""Evaluates every `--eval-every` training steps, beside the sampling for training."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import structlog

from grpo_core.errors import GrpoError
from grpo_core.evaluation.files import save
from grpo_core.evaluation.results import EvalResult
from grpo_env.config.settings import EnvServerSettings
from grpo_env.evaluation.runner import Evaluation, evaluate
from grpo_env.rollout.outcome import SamplingPlan
from grpo_env.rollout.rollout import RolloutEngine
from grpo_env.tasks import Task
from grpo_env.tasks.data_files import DataUnusable
from grpo_env.tasks.items import Item

log = structlog.get_logger()

Report = Callable[[int, Mapping[str, Any]], None]


class TrainingEvaluation:
    """The evaluations of one run.

    An evaluation never ends the run: if it fails, the failure is logged.

    Args:
        wait_for_step: waits until the server serves the policy of a training step
        report: called with the step and the metrics of each evaluation
    """

    def __init__(
        self,
        settings: EnvServerSettings,
        tasks: tuple[Task, ...],
        engine: RolloutEngine,
        wait_for_step: Callable[[int], Awaitable[None]],
        report: Report,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._wait_for_step = wait_for_step
        self._report = report
        self._evaluation = Evaluation.of(settings)
        self._items = [*self._chosen(tasks)] if settings.eval_every else []
        self._done_up_to = self._evaluated_step = -1
        self._running: asyncio.Task[None] | None = None
        self._samples = False

    @property
    def is_running(self) -> bool:
        return self._running is not None and not self._running.done()

    def _chosen(self, tasks: tuple[Task, ...]) -> Iterator[tuple[Task, list[Item]]]:
        for task in tasks:
            try:
                yield task, self._evaluation.chosen(task)
            except DataUnusable as error:
                log.warning("evaluation.left_out", task=task.name, reason=str(error))

    @property
    def groups_for_training(self) -> int:
        """Largest number of groups that may be sampled for training now."""
        most = self._settings.max_concurrent_groups
        if not self._samples or self._settings.eval_handling == "NONE":
            return most
        if self._settings.eval_handling == "STOP_TRAIN":
            return 0
        return int(most * self._settings.eval_limit_ratio)

    def start_if_due(self, step: int, plan: SamplingPlan) -> None:
        """Start an evaluation at the first step seen, and at each multiple of `--eval-every`."""
        every = self._settings.eval_every
        if not self._items or self.is_running:
            return
        if self._done_up_to < 0 or step // every > self._done_up_to // every:
            self._start(step, plan)

    async def finish(self, step: int, plan: SamplingPlan) -> None:
        """Evaluate the policy of the last step."""
        if not self._items:
            return
        await self._ended()
        if self._evaluated_step < step:
            self._start(step, plan)
            await self._ended()

    async def cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _ended(self) -> None:
        if self._running is not None:
            await self._running

    def _start(self, step: int, plan: SamplingPlan) -> None:
        # The first policy is served already. Later, the trainer may need groups to reach the step.
        self._samples = self._done_up_to < 0
        self._done_up_to = step
        self._running = asyncio.create_task(self._run(step, plan))

    async def _run(self, step: int, plan: SamplingPlan) -> None:
        try:
            await self._wait_for_step(step)
            self._samples = True
            for task, items in self._items:
                result = await evaluate(self._engine, task, items, self._evaluation, plan)
                self._record(result)
        except GrpoError as error:
            log.warning("evaluation.failed", step=step, error=f"{type(error).__name__}: {error}")
        finally:
            self._samples = False

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
        if self._settings.eval_output is not None:
            save(result, self._settings.eval_output)
        self._report(result.step or 0, result.flat())
