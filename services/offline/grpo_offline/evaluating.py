"""Evaluates the trainer's weights, and writes the results."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_core.evaluation.files import save
from grpo_core.evaluation.results import EvalResult
from grpo_env.rollout.engine import RolloutEngine
from grpo_env.rollout.groups import SamplingPlan
from grpo_offline.items import EvaluationItems
from grpo_offline.keys import OfflineKeys
from grpo_offline.results import Metrics
from grpo_offline.run_files import RunFiles
from grpo_offline.sampling import TrainedVersion, evaluate_all, require_fresh_evaluation
from grpo_trainer.telemetry.sinks import Recorder


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
        written = []
        for result in results:
            if not self.is_frozen:
                require_fresh_evaluation(result, self.version.accepted)
            result = result.model_copy(update={"step": step})
            save(result, self.files.evaluations)
            self.recorder.record_evaluation(step, result.flat())
            written.append(_metrics(result, step))
        if written:
            record = written[0] | {"frozen": self.is_frozen}
            if len(written) > 1:
                record |= {"tasks": written}
            self.files.write_json(self.files.evaluation(iteration), record)
        return results


def _metrics(result: EvalResult, step: int) -> Metrics:
    return {
        **result.metrics,
        "task": result.task,
        "items": result.item_count,
        "replicates": result.samples,
        "temperature": result.temperature,
        "trained_step": step,
    }
