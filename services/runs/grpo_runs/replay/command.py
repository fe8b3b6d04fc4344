"""Replays a step of a run, and says whether it gave the recorded numbers; or what it would have
been with another objective."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from grpo_core.provenance.chain import Provenance
from grpo_core.tree.objective import ObjectiveOptions
from grpo_core.tree.trainer import TrainerSettings
from grpo_runs.replay.run import (
    RecordedRun,
    ReplayedStep,
    accumulate_recorded,
    changed_settings,
    taken,
)
from grpo_runs.replay.verdict import Say, environment_differences, first_difference, passes
from grpo_runs.settings.replay import ReplaySettings
from grpo_trainer.errors import NonFiniteStep
from grpo_trainer.learner import GradientStats, Learner, with_objective
from grpo_trainer.optim.digests import digests_of
from grpo_trainer.telemetry.provenance import code_of, machine_of


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
    learner = run.learner_at(saved, last)
    say(f"replaying steps {begin + 1} to {last} from {where}, {torch.get_num_threads()} threads")
    digested = sum(bool(run.published(step).digests) for step in range(begin + 1, last + 1))
    if digested < last - begin:
        say(f"weights are compared after {digested} of {last - begin} steps: others have no digest")
    differences = environment_differences(start, code_of(learner.settings), machine_of(learner))
    for line in differences.all:
        say(f"not as in the run: {line}")
    first = provenance.by_step.get(begin)
    if first is not None:
        begun = provenance.start_of(first)
        digests = digests_of(learner.optimizer.masters, begun.parts)
        if differing := first_difference(begun, first, digests):
            say(
                f"{where} does not hold the weights of version {first.version}; the first tensor "
                f"that differs is {differing}"
            )
            return False
    options, rows = settings.objective_options, []
    for row in replayed_steps(run, learner, begin, last, options):
        if not passes(row.step, run.start_of(row.step.step), differences, say):
            return False
        if options:
            rows.append(row)  # with the tokens of its batch
    if options:
        for line in comparison(rows, options, learner.settings):
            say(line)
    return True


def comparison(
    rows: Sequence[Compared], options: Mapping[str, object], settings: TrainerSettings
) -> Iterator[str]:
    """Lines for people. Args: options: of the other objective; settings: of the run"""
    yield f"values of the run → with {_named(options)}, at the weights of the run:"
    kept = {
        name: value
        for name, field in ObjectiveOptions.model_fields.items()
        if name not in options and (value := getattr(settings, name)) != field.default
    }
    if kept:
        yield f"with the run's {_named(kept)} on both sides, unless you pass others"
    yield from table(rows)


def _named(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(options.items()))


Gradients = Sequence[Tensor | None]


@dataclass(frozen=True)
class Compared:
    """One step with both objectives. `other`, `cosine`: None without another one, or if its loss or
    its gradient is not finite; the cosine is None too if one of the gradients is 0"""

    step: ReplayedStep
    own: GradientStats
    other: GradientStats | None
    cosine: float | None


def replayed_steps(
    run: RecordedRun, learner: Learner, begin: int, end: int, options: dict[str, object]
) -> Iterator[Compared]:
    """Take the steps after `begin`, up to `end`, with the run's objective; before each, compute the
    gradients of the other one, if there is one.

    Args: options: of the other objective, by field

    Raises:
        OptionsInvalid: they exclude each other, or those of the run.
    """
    other: Learner | None = None
    for step in range(begin + 1, end + 1):
        continued = run.continued(learner, step)
        if options and (other is None or continued is not learner):
            other = with_objective(continued, changed_settings(continued.settings, options))
        learner = continued
        recorded, gradients = run.batch(step), learner.optimizer.gradients
        theirs: GradientStats | None = None
        found: Gradients = []
        if other is not None:
            with suppress(NonFiniteStep):
                theirs, found = accumulate_recorded(other, recorded, [*options]), gradients.tensors
            gradients.clear()
        own = accumulate_recorded(learner, recorded)
        cosine = _cosine(gradients.tensors, found) if theirs else None
        del found
        yield Compared(taken(run, learner, step, own), own, theirs, cosine)


@torch.no_grad()
def _cosine(ours: Gradients, theirs: Gradients) -> float | None:
    """Of the angle between two gradients; None if one of them is 0."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    dot = sum(float((a.double() * b.double()).sum()) for a, b in pairs)
    size = _square(ours) * _square(theirs)
    return dot / size**0.5 if size > 0 else None


def _square(gradients: Gradients) -> float:
    return sum(float(g.double().square().sum()) for g in gradients if g is not None)


HEADINGS = ("step", "loss", "gradient norm", "cosine", "clipped")


def table(rows: Sequence[Compared]) -> Iterator[str]:
    """Lines for people: of each step, values of the run → with the other objective."""
    cells = [HEADINGS, *map(_cells, rows)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(HEADINGS))]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _cells(row: Compared) -> tuple[str, ...]:
    own, other = row.own, row.other
    if other is None:
        return (str(row.step.step), f"{own.loss:+.6f} → not finite", f"{own.norm:.4f}", "", "")
    return (
        str(row.step.step),
        f"{own.loss:+.6f} → {other.loss:+.6f}",
        f"{own.norm:.4f} → {other.norm:.4f}",
        "-" if row.cosine is None else f"{row.cosine:+.4f}",
        f"{_clipped(own):.2%} → {_clipped(other):.2%}",
    )


def _clipped(stats: GradientStats) -> float:
    return stats.sums.mean("clipped") or 0.0
