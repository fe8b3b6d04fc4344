"""Ends an iteration: writes its record, evaluates, and names its checkpoint; also after a kill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_core.evaluation.results import EvalResult
from grpo_core.wire.scored_group import ScoredGroup
from grpo_offline.errors import RunUnusable
from grpo_offline.iteration_record import iteration_record, last_steps
from grpo_offline.keys import OfflineKeys
from grpo_offline.results import Metrics
from grpo_offline.run_files import RunFiles
from grpo_offline.screen import Screen

Evaluate = Callable[[int], list[EvalResult]]


@dataclass(frozen=True)
class IterationEnd:
    """`is_frozen`: the rollouts are those of weights that stay as they are."""

    keys: OfflineKeys
    files: RunFiles
    screen: Screen
    is_frozen: bool

    def close(
        self, evaluate: Evaluate, iteration: int, groups: Sequence[ScoredGroup]
    ) -> tuple[Metrics, list[EvalResult]]:
        """Write what is known of an iteration whose steps are taken, and evaluate it if that is
        due."""
        files, steps = self.files, self.keys.steps_per_iteration
        newest = last_steps(files.metrics, steps)
        record = iteration_record(iteration, newest, groups, self.is_frozen)
        files.write_json(files.train(iteration), record)
        results = evaluate(iteration) if self._is_evaluated(iteration) else []
        files.name_checkpoints(steps)
        return record, results

    def close_again(self, evaluate: Evaluate, iteration: int) -> None:
        """If the run was killed between the last checkpoint and the end of its iteration."""
        expected = [self.files.train(iteration)]
        if self._is_evaluated(iteration):
            expected.append(self.files.evaluation(iteration))
        if not all(path.is_file() for path in expected):
            self.close(evaluate, iteration, self._saved_groups(iteration))

    def close_complete(self) -> None:
        """If the run was killed between its last checkpoint and the end of its last iteration."""
        last = self.keys.train.iterations - 1
        if not self.files.train(last).is_file():
            self.close(lambda _: [], last, self._saved_groups(last))
        if self._is_evaluated(last) and not self.files.evaluation(last).is_file():
            self.screen.warn(
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

    def _is_evaluated(self, iteration: int) -> bool:
        keys, done = self.keys, iteration + 1
        is_due = done % keys.eval.interval == 0 or done == keys.train.iterations
        return keys.eval.enabled and is_due
