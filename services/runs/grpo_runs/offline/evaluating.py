"""Evaluates the trainer's weights, and writes the results."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_core.evaluation.results import EvalResult, save
from grpo_env.evaluation import Evaluation, evaluate
from grpo_env.rollout.engine import RolloutEngine
from grpo_env.rollout.groups import SamplingPlan
from grpo_runs.offline.items import EvaluationItems
from grpo_runs.offline.keys import EvalKeys, OfflineKeys
from grpo_runs.offline.results import Metrics
from grpo_runs.offline.run_files import RunFiles
from grpo_runs.offline.sampling import TrainedVersion, require_fresh
from grpo_trainer.telemetry.sinks import Recorder

_LARGEST_K = 5


@dataclass(frozen=True)
class Evaluator:
    """Args:
    runner: runs coroutines
    engine: samples the answers
    version: of the trainer's weights
    chosen: items of each task; none: nothing is evaluated
    plan: how training samples
    recorder: of the trainer
    is_frozen: the answers are those of weights that stay as they are
    """

    runner: asyncio.Runner
    engine: RolloutEngine
    version: TrainedVersion
    chosen: Sequence[EvaluationItems]
    plan: SamplingPlan
    recorder: Recorder
    keys: OfflineKeys
    files: RunFiles
    is_frozen: bool

    def evaluate(self, iteration: int | str) -> list[EvalResult]:
        """Args: iteration: names the file, see `RunFiles.evaluation`

        Raises:
            StaleServer: answers are of other weights than the trainer's.
            GrpoError: the errors of `evaluate_all`.
        """
        keys, step = self.keys, self.version().step
        results = self.runner.run(
            evaluate_all(self.engine, self.chosen, keys.eval, self.plan, keys.seed)
        )
        written: list[Metrics] = []
        for result in results:
            if not self.is_frozen:
                versions = {*(result.versions or ())}
                require_fresh(versions, self.version.accepted, "answers of the evaluation")
            result = result.model_copy(update={"step": step})
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


def evaluation_of(keys: EvalKeys, seed: int) -> Evaluation:
    """How to evaluate. Args: seed: of the intervals"""
    samples = keys.replicates if keys.do_sample else 1
    return Evaluation(
        items=keys.num_ids,
        samples=samples,
        temperature=keys.temperature if keys.do_sample else 0.0,
        requests=keys.batch_size,
        seed=seed,
        reshaping={"top_p": keys.top_p} if keys.do_sample and keys.top_p < 1 else {},
        ks=tuple({1, min(_LARGEST_K, samples)}),
    )


async def evaluate_all(
    engine: RolloutEngine,
    chosen: Sequence[EvaluationItems],
    keys: EvalKeys,
    plan: SamplingPlan,
    seed: int,
) -> list[EvalResult]:
    """One result for each task.

    Raises:
        NothingEvaluated, ServiceUnavailable, ProtocolViolation: see `evaluate`.
    """
    plan = replace(plan, max_completion_tokens=keys.max_new_tokens)
    evaluation = evaluation_of(keys, seed)
    return [await evaluate(engine, one.task, one.items, evaluation, plan) for one in chosen]
