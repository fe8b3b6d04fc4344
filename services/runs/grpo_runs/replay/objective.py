"""What recorded steps would have been with another objective, at the weights of the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_runs.replay.run import RecordedRun, changed_settings
from grpo_runs.replay.steps import ReplayedStep, gradients_of, taken
from grpo_trainer.errors import NonFiniteStep
from grpo_trainer.learner import GradientStats, Learner, with_objective

Gradients = Sequence[Tensor | None]


@dataclass(frozen=True)
class Compared:
    """One step with both objectives. `other`, `cosine`: None if the other loss or its gradient is
    not finite; the cosine is None too if one of the gradients is 0"""

    step: ReplayedStep
    own: GradientStats
    other: GradientStats | None
    cosine: float | None


def compared_steps(
    run: RecordedRun, learner: Learner, begin: int, end: int, options: dict[str, object]
) -> Iterator[Compared]:
    """Take the steps after `begin`, up to `end`, with the run's objective; before each, compute the
    gradients of the other one.

    Args: options: of the other objective, by field

    Raises:
        OptionsInvalid: they exclude each other, or those of the run.
    """
    other = with_objective(learner, changed_settings(learner.settings, options))
    for step in range(begin + 1, end + 1):
        continued = run.continued(learner, step)
        if continued is not learner:
            learner = continued
            other = with_objective(learner, changed_settings(learner.settings, options))
        recorded, gradients = run.batch(step), learner.optimizer.gradients
        try:
            theirs, found = gradients_of(other, recorded, given=[*options]), gradients.tensors
        except NonFiniteStep:
            theirs, found = None, []
        gradients.clear()
        own = gradients_of(learner, recorded)
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
