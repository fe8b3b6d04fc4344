"""One run: sample → reward → train → publish → evaluate → save, iteration by iteration."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.scored_group import ScoredGroup
from grpo_env.assembly import TaskSet, open_tasks, open_template, sampling_plan
from grpo_env.rollout.engine import RolloutEngine
from grpo_env.settings import EnvServerSettings
from grpo_offline.backends.choice import Sampling, choose
from grpo_offline.backends.opening import Backends
from grpo_offline.batches import InProcessQueue, optimizer_batches, with_own_logprobs
from grpo_offline.evaluating import Evaluator
from grpo_offline.items import EvaluationItems, TrainingItems, items_to_evaluate, items_to_train
from grpo_offline.iteration_end import IterationEnd
from grpo_offline.keys import OfflineKeys
from grpo_offline.results import RunResult, draw, evaluations, result_of
from grpo_offline.run_files import BEFORE, RunFiles
from grpo_offline.sampling import (
    Sampler,
    TrainedVersion,
    require_fresh,
    require_own_policy,
)
from grpo_offline.screen import Screen
from grpo_offline.translate import environment_settings, trainer_command
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.data.batches import Position
from grpo_trainer.model.policy import limits_of
from grpo_trainer.ranks.group import ALONE, Ranks, settings_of_rank
from grpo_trainer.ranks.heartbeat import joined
from grpo_trainer.stop import Stop
from grpo_trainer.train import Lead, Run, open_run, train, training_steps


def run_offline(keys: OfflineKeys, directory: Path, screen: Screen) -> RunResult:
    """Train, or continue the run of `directory`. If torchrun or accelerate has started several
    processes, this one is rank 0, and the others call `follow_offline`.

    Raises:
        GrpoError: the run cannot go on; what it saved stays.
        SystemExit: with status 2 and a line on standard error, if an option is not valid.
    """
    files = RunFiles(directory)
    files.write_keys(keys)
    sampling = choose(keys)
    line = trainer_command(keys, sampling, directory)
    environment = environment_settings(keys, directory)
    with open_tasks(environment) as tasks:
        template = open_template(environment, tasks)
        _introduce(keys, sampling, files, screen)
        backends = Backends(keys, sampling, tasks, template)

        with joined(line.processes()) as ranks, asyncio.Runner() as runner:
            settings = settings_of_rank(line.settings(), line.processes())
            job = Job(keys, sampling, settings, environment, tasks, backends, files, screen, ranks)
            return job.run(runner)


def follow_offline(keys: OfflineKeys, directory: Path) -> None:
    """Take part in the run of `directory` as a rank above 0, until rank 0 ends.

    Args: keys: those of rank 0

    Raises:
        LostRank: another process ended.
    """
    with tempfile.TemporaryDirectory() as written_to:
        line = trainer_command(keys, choose(keys), directory, Path(written_to))
    with joined(line.processes()) as ranks:
        train(settings_of_rank(line.settings(), line.processes()), ranks)


def _introduce(keys: OfflineKeys, sampling: Sampling, files: RunFiles, screen: Screen) -> None:
    where = "in this process" if sampling.server == "local" else keys.generation.base_url
    screen.say(
        f"{keys.model.train_id} on {keys.data.task}: {keys.train.iterations} iterations of "
        f"{keys.sequences_per_iteration} rollouts, sampled {where}, weights: {sampling.mode}"
    )
    screen.say(f"files: {files.path}")
    if sampling.is_frozen:
        screen.warn(
            f"the weights of {where} stay as they are: every rollout and evaluation is of the "
            "untrained model, and every record says so (frozen). Start vllm-api-server there to "
            "train on fresh rollouts"
        )


@dataclass(frozen=True)
class Job:
    """The parts of one run."""

    keys: OfflineKeys
    sampling: Sampling
    settings: TrainerSettings
    environment: EnvServerSettings
    tasks: TaskSet
    backends: Backends
    files: RunFiles
    screen: Screen
    ranks: Ranks = ALONE

    @property
    def _end(self) -> IterationEnd:
        return IterationEnd(self.keys, self.files, self.screen, self.sampling.is_frozen)

    def run(self, runner: asyncio.Runner) -> RunResult:
        queue = InProcessQueue()
        to_train = items_to_train(self.tasks, self.keys)
        to_evaluate = items_to_evaluate(self.tasks, self.keys) if self.keys.eval.enabled else []
        with open_run(self.settings, queue, self.backends.weight_sync, self.ranks) as opened:
            if opened is None:
                self._end.close_complete()
            else:
                run, position = opened
                assert run.lead is not None, "call run_offline on rank 0"
                with self._engines(runner, run, run.lead, position) as engines:
                    self._iterate(
                        runner, run, run.lead, position, queue, engines, to_train, to_evaluate
                    )
        self._finish()
        return result_of(self.files)

    @contextlib.contextmanager
    def _engines(
        self, runner: asyncio.Runner, run: Run, lead: Lead, position: Position
    ) -> Iterator[Engines]:
        stack = contextlib.AsyncExitStack()
        version = TrainedVersion(position, lead.sync.begun_as)
        keys = self.keys

        async def opened() -> Engines:
            training = await stack.enter_async_context(
                self.backends.engine(run.policy, version, keys.generation.backend, self.environment)
            )
            is_same = (keys.eval.backend, keys.eval.base_url) == (
                keys.generation.backend,
                keys.generation.base_url,
            )
            if is_same and self.sampling.server != "local":
                return Engines(training, training, version)
            other = self.environment.model_copy(update={"inference_url": (keys.eval.base_url,)})
            evaluation = await stack.enter_async_context(
                self.backends.engine(
                    run.policy, version, keys.eval.backend, other, keys.eval.seed_base
                )
            )
            return Engines(training, evaluation, version)

        try:
            yield runner.run(opened())
        finally:
            runner.run(stack.aclose())

    def _iterate(
        self,
        runner: asyncio.Runner,
        run: Run,
        lead: Lead,
        position: Position,
        queue: InProcessQueue,
        engines: Engines,
        to_train: TrainingItems,
        to_evaluate: Sequence[EvaluationItems],
    ) -> None:
        keys, files = self.keys, self.files
        steps, problems = keys.steps_per_iteration, keys.data.problems_per_iteration
        plan = sampling_plan(self.environment, self.tasks)
        sampler = Sampler(
            engines.training,
            plan,
            keys.generation.batch_size,
            has_logprobs=self.sampling.server != "stock_vllm",
        )
        evaluator = Evaluator(
            runner,
            engines.evaluation,
            engines.version,
            to_evaluate,
            plan,
            lead.recorder,
            keys,
            files,
            self.sampling.is_frozen and keys.eval.backend != "local",
        )
        begun_at = position.step // steps
        if begun_at == 0:
            evaluator.evaluate(BEFORE)
        else:
            self.screen.say(f"continues after {begun_at} of {keys.train.iterations} iterations")
            self._end.close_again(evaluator.evaluate, begun_at - 1)
        training = training_steps(run, position, Stop())
        stream = to_train.stream(begun_at, problems)
        total = keys.train.iterations
        with self.screen.bar(begun_at, total) as bar:
            for iteration in range(begun_at, total):
                started = time.monotonic()
                items = [stream.next() for _ in range(problems)]
                groups = files.read_groups(iteration)
                if groups is None:
                    lead.sync.recover_server()
                    if sampler.has_logprobs and not self.sampling.is_frozen:
                        runner.run(require_own_policy(engines.training, run.policy))
                    groups = runner.run(sampler.groups(items, to_train.spare(iteration))).groups
                    self._require_fresh(groups, engines.version.accepted)
                    files.write_groups(iteration, groups)
                batches = self._batches(run, lead, groups)
                queue.put(batches)
                for _ in batches:
                    position = next(training)
                engines.version.trained(position)
                record, results = self._end.close(evaluator.evaluate, iteration, groups)
                self.screen.iteration(record, total, time.monotonic() - started, results)
                bar.advance(bar.task_ids[0])

    def _require_fresh(self, groups: Sequence[ScoredGroup], accepted: set[PolicyVersion]) -> None:
        if not self.sampling.is_frozen:
            require_fresh(groups, accepted)

    def _batches(
        self, run: Run, lead: Lead, groups: Sequence[ScoredGroup]
    ) -> Sequence[list[ScoredGroup]]:
        """Those of the optimizer steps of an iteration."""
        settings = self.settings
        limits = limits_of(run.policy, settings.seq_len, settings.recompute_logprobs)
        steps = self.keys.steps_per_iteration
        if settings.recompute_logprobs and steps > 1:
            groups = with_own_logprobs(groups, run, lead.batches.collate, limits)
        return optimizer_batches(groups, steps, settings.resolved_objective, limits)

    def _finish(self) -> None:
        from grpo_local.report.page import write_report
        from grpo_local.run_directory import RunDirectory

        draw(self.files)
        report = write_report(RunDirectory(self.files.path))
        found = evaluations(self.files)
        if found:
            self.screen.evaluated(found[0][1], found[-1][1])
        self.screen.say(f"model:  {self.files.model}")
        self.screen.say(f"curves: {self.files.plot}")
        self.screen.say(f"report: {report}")


@dataclass(frozen=True)
class Engines:
    """Sample for training and for evaluation. `version`: of the trainer's weights."""

    training: RolloutEngine
    evaluation: RolloutEngine
    version: TrainedVersion
