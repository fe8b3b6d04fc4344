"""Ends an iteration: writes its record, evaluates the trainer's weights, and names its checkpoint;
also after a kill."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any

from grpo_core.evaluation.results import EvalResult, save
from grpo_core.wire.scored_group import ScoredGroup
from grpo_env.evaluation import Evaluation, evaluate
from grpo_env.rollout.engine import RolloutEngine
from grpo_env.rollout.groups import SamplingPlan
from grpo_env.settings import EnvServerSettings
from grpo_runs.offline.data import EvaluationItems
from grpo_runs.offline.errors import RunUnusable
from grpo_runs.offline.keys import EvalKeys, OfflineKeys
from grpo_runs.offline.results import Metrics
from grpo_runs.offline.run_files import RunFiles
from grpo_runs.offline.sampling import TrainedVersion, require_fresh, versions_of
from grpo_runs.offline.screen import OfflineScreen
from grpo_trainer.telemetry.sinks import Recorder

_LARGEST_K = 5
_MEANS = {
    "loss_pg": "train/loss_policy",
    "loss_kl": "train/loss_kl",
    "loss_entropy": "train/loss_entropy",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "entropy": "policy/entropy",
    "kl_coef": "policy/kl_coef",
    "clipped_fraction": "grpo/clipped_fraction",
    "mean_ratio": "grpo/mean_ratio",
    "maxent_tau": "maxent/tau",
    "maxent_weights_entropy": "maxent/weights_entropy",
    "failed_checks": "checks/failed",
}
"""Key of the file: metric of the trainer, whose mean over the optimizer steps it is."""

Steps = Sequence[Mapping[str, Any]]
Evaluate = Callable[[int | str], list[EvalResult]]


def iteration_record(
    iteration: int, steps: Steps, groups: Sequence[ScoredGroup], is_frozen: bool
) -> dict[str, Any]:
    """Losses are means over the optimizer steps, with `loss_total = loss_pg + loss_kl +
    loss_entropy` and, for a penalty in the loss, `loss_kl = kl_coef * kl_divergence`; so
    `kl_divergence` is weighted with the coefficient of each step. It is None without a reference
    model.

    `served_step` and `trained_step`: optimizer steps that the weights included which sampled, and
    those which resulted.
    """
    scores = [score for group in groups for score in group.scores]
    means = {name: _mean(steps, metric) for name, metric in _MEANS.items()}
    parts = [means[name] or 0.0 for name in ("loss_pg", "loss_kl", "loss_entropy")]
    divergence = _mean(steps, "policy/reference_kl")
    if means["loss_kl"] and means["kl_coef"]:
        divergence = means["loss_kl"] / means["kl_coef"]
    record: dict[str, Any] = {
        "iteration": iteration,
        "loss_total": sum(parts),
        **means,
        "kl_divergence": divergence,
        "reward_mean": fmean(scores),
        "reward_std": pstdev(scores),
        "equal_scores_fraction": fmean(len({*group.scores}) == 1 for group in groups),
        "completion_tokens_mean": fmean(
            sum(mask >= 0 for mask in masks) for group in groups for masks in group.masks
        ),
        "groups": len(groups),
        "sequences": len(scores),
        "optimizer_steps": len(steps),
        "served_step": max((version.step for version in versions_of(groups)), default=0),
        "trained_step": steps[-1]["step"],
        "frozen": is_frozen,
    }
    return {k: v for k, v in record.items() if v is not None or k == "kl_divergence"}


def _mean(steps: Steps, metric: str) -> float | None:
    values = [step[metric] for step in steps if metric in step]
    return fmean(values) if values else None


@dataclass(frozen=True)
class IterationEnd:
    """Records an iteration whose steps are taken, and evaluates the weights if that is due.

    Args:
        is_frozen: the rollouts are those of weights that stay as they are
        evaluate: evaluates the weights after an iteration, and writes the results
    """

    keys: OfflineKeys
    files: RunFiles
    is_frozen: bool
    evaluate: Evaluate = lambda _: []

    def close(
        self, iteration: int, groups: Sequence[ScoredGroup]
    ) -> tuple[Metrics, list[EvalResult]]:
        """Write what is known of an iteration whose steps are taken, and evaluate it if that is
        due."""
        files, steps = self.files, self.keys.steps_per_iteration
        lines = files.metrics.read_text(encoding="utf-8").splitlines()
        newest = [json.loads(line) for line in lines[-steps:]]
        record = iteration_record(iteration, newest, groups, self.is_frozen)
        files.write_json(files.train(iteration), record)
        results = self.evaluate(iteration) if self._is_evaluated(iteration) else []
        files.name_checkpoints(steps)
        return record, results

    def close_again(self, iteration: int) -> None:
        """If the run was killed between the last checkpoint and the end of its iteration."""
        is_recorded = self.files.train(iteration).is_file()
        if not is_recorded or self._lacks_evaluation(iteration):
            self.close(iteration, self._saved_groups(iteration))

    def close_complete(self, screen: OfflineScreen) -> None:
        """If the run was killed between its last checkpoint and the end of its last iteration."""
        last = self.keys.train.iterations - 1
        if not self.files.train(last).is_file():
            self.close(last, self._saved_groups(last))
        if self._lacks_evaluation(last):
            screen.warning(
                "the run was killed before its last evaluation, which is missing; raise "
                "train.iterations to go on, or evaluate final_model with grpo-eval"
            )

    def _saved_groups(self, iteration: int) -> list[ScoredGroup]:
        groups = self.files.read_groups(iteration)
        if groups is None:
            raise RunUnusable(
                f"{self.files.groups(iteration)} is missing: the run was killed before it wrote "
                "the record of this iteration, and needs that file to write it"
            )
        return groups

    def _lacks_evaluation(self, iteration: int) -> bool:
        return self._is_evaluated(iteration) and not self.files.evaluation(iteration).is_file()

    def _is_evaluated(self, iteration: int) -> bool:
        keys, done = self.keys, iteration + 1
        is_due = done % keys.eval.interval == 0 or done == keys.train.iterations
        return keys.eval.enabled and is_due


def evaluation_of(keys: EvalKeys, environment: EnvServerSettings) -> Evaluation:
    """How to evaluate."""
    found = Evaluation.of(environment)
    reshaping = {"top_p": keys.top_p} if keys.do_sample and keys.top_p < 1 else {}
    return replace(found, reshaping=reshaping, ks=tuple({1, min(_LARGEST_K, found.samples)}))


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the trainer's weights, and writes the results.

    Args:
        runner: runs coroutines
        engine: samples the answers
        version: of the trainer's weights
        chosen: items of each task; none: nothing is evaluated
        plan: how to sample, but for what `evaluation` says
        recorder: of the trainer
        is_frozen: the answers are those of weights that stay as they are
    """

    runner: asyncio.Runner
    engine: RolloutEngine
    version: TrainedVersion
    chosen: Sequence[EvaluationItems]
    evaluation: Evaluation
    plan: SamplingPlan
    recorder: Recorder
    files: RunFiles
    is_frozen: bool

    def evaluate(self, iteration: int | str) -> list[EvalResult]:
        """Sample and grade the items. Args: iteration: names the file, see `RunFiles.evaluation`

        Raises:
            StaleServer: answers are of other weights than the trainer's.
            NothingEvaluated, ServiceUnavailable, ProtocolViolation: see `evaluate`.
        """
        step = self.version().step
        plan = replace(self.plan, step=step)
        results = [
            self.runner.run(
                evaluate(self.engine, one.task, one.items, self.evaluation, plan)
            ).model_copy(update={"step": step})
            for one in self.chosen
        ]
        written: list[Metrics] = []
        for result in results:
            if not self.is_frozen:
                versions = {*(result.versions or ())}
                require_fresh(versions, self.version.accepted, "answers of the evaluation")
            save(result, self.files.evaluations)
            self.recorder.record_evaluation(step, result.flat())
            written.append(
                {
                    **result.metrics,
                    "task": result.task,
                    "items": result.item_count,
                    "replicates": result.samples,
                    "temperature": result.temperature,
                    "trained_step": step,
                }
            )
        if written:
            record = written[0] | {"frozen": self.is_frozen}
            if len(written) > 1:
                record |= {"tasks": written}
            self.files.write_json(self.files.evaluation(iteration), record)
        return results
