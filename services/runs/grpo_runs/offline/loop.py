"""One run: sample → reward → train → publish → evaluate → save, iteration by iteration."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from grpo_core.tree.trainer import TrainerSettings
from grpo_core.wire.scored_group import ScoredGroup
from grpo_env.assembly import open_tasks, open_template, sampling_plan
from grpo_env.tasks.item_stream import ItemStream
from grpo_env.tasks.items import Item
from grpo_runs.offline.data import (
    InProcessQueue,
    Parts,
    items_to_evaluate,
    items_to_train,
    optimizer_batches,
    with_own_logprobs,
)
from grpo_runs.offline.iteration_end import Evaluator, IterationEnd, evaluation_of
from grpo_runs.offline.keys import OfflineKeys
from grpo_runs.offline.results import RunResult, draw, lift_lines, result_of
from grpo_runs.offline.run_files import BEFORE, RunFiles
from grpo_runs.offline.sampling import (
    Engines,
    Sampler,
    TrainedVersion,
    open_weights,
    require_fresh,
    require_own_policy,
    versions_of,
)
from grpo_runs.offline.screen import OfflineScreen
from grpo_runs.offline.servers import Sampling, choose
from grpo_runs.offline.translate import environment_settings, trainer_command
from grpo_runs.report.summary import warnings_text
from grpo_trainer.model.policy import CausalLM, limits_of
from grpo_trainer.ranks import Ranks, process_group, settings_of_rank
from grpo_trainer.roles import Lead
from grpo_trainer.stop import Stop
from grpo_trainer.train import open_run, train, training_steps

T = TypeVar("T")


def run_offline(keys: OfflineKeys, directory: Path, screen: OfflineScreen) -> RunResult:
    """Train, or continue the run of `directory`. If torchrun or accelerate has started several
    processes, this one is rank 0, and the others call `follow_offline`.

    Raises:
        KeysInvalid: an option is not valid.
        GrpoError: the run cannot go on; what it saved stays.
    """
    files = RunFiles(directory)
    files.write_keys(keys)
    sampling = choose(keys)
    line = trainer_command(keys, sampling, directory)
    environment = environment_settings(keys)
    with open_tasks(environment) as tasks:
        engines = Engines(keys, sampling, environment, tasks, open_template(environment, tasks))
        _introduce(keys, sampling, files, screen)
        with (
            screen.waiting(lambda: screen.doing),
            process_group(line) as ranks,
            asyncio.Runner() as runner,
        ):
            settings = settings_of_rank(line.settings(), line)
            OfflineRun(keys, settings, engines, files, screen, runner).run(ranks)
    return _finish(files, screen)


def follow_offline(keys: OfflineKeys, directory: Path) -> None:
    """Take part in the run of `directory` as a rank above 0, until rank 0 ends.

    Args: keys: those of rank 0

    Raises:
        LostRank: another process ended.
    """
    line = trainer_command(keys, choose(keys), directory)
    with process_group(line) as ranks:
        train(settings_of_rank(line.settings(), line), ranks)


def _introduce(
    keys: OfflineKeys, sampling: Sampling, files: RunFiles, screen: OfflineScreen
) -> None:
    where = "in this process" if sampling.server == "local" else keys.generation.base_url
    screen.line(
        f"{keys.model.train_id} on {keys.data.task}: {keys.train.iterations} iterations of "
        f"{keys.sequences_per_iteration} rollouts, sampled {where}, weights: {sampling.mode}"
    )
    screen.line(f"files: {files.path}")
    if sampling.is_frozen:
        screen.warning(
            f"the weights of {where} stay as they are: rollouts and evaluations are those of the "
            "untrained model (frozen in each record). For fresh ones, start vllm-api-server there"
        )


def _finish(files: RunFiles, screen: OfflineScreen) -> RunResult:
    from grpo_runs.report.page import write_report

    draw(files)
    report = write_report(files)
    screen.lines(lift_lines(files))
    if screen.warned:
        screen.line(f"warnings: {warnings_text(screen.warned)}")
    screen.line(f"model:  {files.model}")
    screen.line(f"curves: {files.plot}")
    screen.line(f"report: {report}")
    return result_of(files)


@contextlib.contextmanager
def _entered(runner: asyncio.Runner, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
    stack = contextlib.AsyncExitStack()
    try:
        yield runner.run(stack.enter_async_context(manager))
    finally:
        runner.run(stack.aclose())


@dataclass(frozen=True)
class OfflineRun:
    """The loop of iterations. Args: runner: runs coroutines"""

    keys: OfflineKeys
    settings: TrainerSettings
    engines: Engines
    files: RunFiles
    screen: OfflineScreen
    runner: asyncio.Runner

    def run(self, ranks: Ranks) -> None:
        keys, files, engines, queue = self.keys, self.files, self.engines, InProcessQueue()
        tasks, sampling, environment = engines.tasks, engines.sampling, engines.environment
        to_train = items_to_train(tasks, keys)
        to_evaluate = items_to_evaluate(tasks, keys) if keys.eval.enabled else []
        weights = partial(open_weights, keys, sampling)
        with open_run(self.settings, queue, weights, ranks) as opened:
            if opened is None:
                IterationEnd(keys, files, sampling.is_frozen).close_complete(self.screen)
                return
            lead, position = opened
            assert isinstance(lead, Lead), "call run_offline on rank 0"
            version = TrainedVersion(position, lead.sync.begun_as)
            sources = engines.opened(lead.learner.policy, version)
            with _entered(self.runner, sources) as (training, evaluating):
                plan = sampling_plan(environment, tasks, steps=self.settings.steps)
                evaluator = Evaluator(
                    self.runner,
                    evaluating,
                    version,
                    to_evaluate,
                    evaluation_of(keys.eval, environment),
                    replace(plan, max_completion_tokens=keys.eval.max_new_tokens),
                    lead.recorder,
                    files,
                    sampling.is_frozen and keys.eval.backend != "local",
                )
                has_logprobs = sampling.server != "stock_vllm"
                sampler = Sampler(training, plan, keys.generation.batch_size, has_logprobs)
                end = IterationEnd(keys, files, sampling.is_frozen, evaluator.evaluate)
                self._iterate(lead, version, queue, sampler, to_train, end)

    def _iterate(
        self,
        lead: Lead,
        version: TrainedVersion,
        queue: InProcessQueue,
        sampler: Sampler,
        to_train: Parts,
        end: IterationEnd,
    ) -> None:
        keys = self.keys
        problems, total = keys.data.problems_per_iteration, keys.train.iterations
        begun_at = version.position.step // keys.steps_per_iteration
        if begun_at == 0:
            self.screen.doing = "evaluating the model before the first iteration"
            end.evaluate(BEFORE)
        else:
            self.screen.line(f"continues after {begun_at} of {total} iterations")
            end.close_again(begun_at - 1)
        training = training_steps(lead, version.position, Stop())
        stream = ItemStream(to_train, keys.seed)
        for _ in range(begun_at * problems):
            stream.next()
        with self.screen.bar("iterations", begun_at, total) as advance:
            for iteration in range(begun_at, total):
                started = time.monotonic()
                items = [stream.next() for _ in range(problems)]
                groups = self.files.read_groups(iteration)
                if groups is None:
                    self.screen.doing = f"sampling {problems} groups"
                    lead.sync.recover_server()
                    spare = ItemStream(to_train, keys.seed + 1 + iteration)
                    groups = self._sampled(sampler, items, spare, lead.learner.policy, version)
                    self.files.write_groups(iteration, groups)
                batches = self._batches(lead, groups)
                self.screen.doing = "training"
                queue.put(batches)
                for _ in batches:
                    position = next(training)
                version.trained(position)
                self.screen.doing = "evaluating the model"
                record, results = end.close(iteration, groups)
                self.screen.iteration(record, total, time.monotonic() - started, results)
                advance()

    def _sampled(
        self,
        sampler: Sampler,
        items: Sequence[Item],
        spare: ItemStream,
        policy: CausalLM,
        version: TrainedVersion,
    ) -> list[ScoredGroup]:
        """Raises `StaleServer`: the rollouts are not the policy's."""
        is_frozen = self.engines.sampling.is_frozen
        if sampler.has_logprobs and not is_frozen:
            self.runner.run(require_own_policy(sampler.engine, policy))
        plan = replace(sampler.plan, step=version.position.step)
        groups = self.runner.run(replace(sampler, plan=plan).groups(items, spare))
        if not is_frozen:
            require_fresh(versions_of(groups), version.accepted)
        return groups

    def _batches(self, lead: Lead, groups: Sequence[ScoredGroup]) -> Sequence[list[ScoredGroup]]:
        """Those of the optimizer steps of an iteration."""
        settings, learner = self.settings, lead.learner
        limits = limits_of(learner.policy, settings)
        steps = self.keys.steps_per_iteration
        if settings.recompute_logprobs and steps > 1:
            groups = with_own_logprobs(groups, learner, lead.batches.collate, limits)
        return optimizer_batches(groups, steps, settings.resolved_objective, limits)
