"""Replays a step of a run, and says whether it gave the recorded numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from transformers.utils.logging import disable_progress_bar

from grpo_core.provenance.chain import Provenance
from grpo_core.provenance.records import newest
from grpo_core.tree.objective import ObjectiveOptions
from grpo_runs.replay.objective import compared_steps, table
from grpo_runs.replay.run import RecordedRun
from grpo_runs.replay.steps import ReplayedStep, replayed_steps
from grpo_runs.replay.verdict import (
    Differences,
    begin_problem,
    environment_differences,
    verdict_of,
)
from grpo_runs.settings.replay import ReplaySettings
from grpo_trainer.learner import Learner
from grpo_trainer.telemetry.provenance import code_of, machine_of
from grpo_trainer.weight_digests import digests_of

Say = Callable[[str], None]


def replay_run(provenance: Provenance, settings: ReplaySettings, say: Say) -> bool:
    """Whether the replay gave the recorded numbers. Stops at the first step that did not.

    Args: say: prints a line

    Raises:
        NotReplayable, DamagedState, OptionsInvalid: nothing was replayed.
    """
    run, last = RecordedRun(provenance), settings.step
    start = run.start_of(last)
    disable_progress_bar()
    torch.set_num_threads(settings.threads or start.machine.threads)
    saved = run.checkpoint_before(last)
    where = f"the model {start.model}" if saved is None else str(saved.directory)
    begin = 0 if saved is None else saved.record.step
    for step in range(begin + 1, last + 1):
        run.batch(step)  # before the model is loaded
    learner, begin = run.learner_before(last)
    say(f"replaying steps {begin + 1} to {last} from {where}, {torch.get_num_threads()} threads")
    differences = environment_differences(start, code_of(learner.settings), machine_of(learner))
    for line in differences.all:
        say(f"not as in the run: {line}")
    first = newest(provenance.lines, begin)
    if first is not None:
        begun = provenance.start_of(first)
        digests = digests_of(learner.optimizer.masters, begun.parts)
        if problem := begin_problem(begun, first, digests, where):
            say(problem)
            return False
    if settings.objective_options:
        return _compare(run, learner, begin, settings, differences, say)
    steps = replayed_steps(run, learner, begin, last)
    return all(_passes(run, step, differences, say) for step in steps)


def _passes(run: RecordedRun, step: ReplayedStep, differences: Differences, say: Say) -> bool:
    verdict = verdict_of(step, run.start_of(step.step), differences)
    for line in verdict.lines:
        say(line)
    return verdict.passes


def _compare(
    run: RecordedRun,
    learner: Learner,
    begin: int,
    settings: ReplaySettings,
    differences: Differences,
    say: Say,
) -> bool:
    rows = []
    options = settings.objective_options
    for row in compared_steps(run, learner, begin, settings.step, options):
        if not _passes(run, row.step, differences, say):
            return False
        rows.append(row)
    say(f"values of the run → with {_named(options)}, at the weights of the run:")
    kept = {
        name: value
        for name, field in ObjectiveOptions.model_fields.items()
        if name not in options and (value := getattr(learner.settings, name)) != field.default
    }
    if kept:
        say(f"with the run's {_named(kept)} on both sides, unless you pass others")
    for line in table(rows):
        say(line)
    return True


def _named(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(options.items()))
