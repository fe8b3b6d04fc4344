"""Evaluations of a run: each one as it arrives, their change, their curves and facts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from grpo_core.evaluation.results import (
    METRICS_PREFIX,
    EvalSummary,
    ResultsUnusable,
    details_path,
    read_result,
    read_summaries,
    summary_of,
)
from grpo_core.evaluation.tables import Lift, NotComparable, compare
from grpo_core.rollouts.page.encode import Interval, Point
from grpo_runs.watch.followed_file import FollowedFile

SHOWN = "pass@1"
FEW_ITEMS = 10
"""With fewer items, an interval is so wide that it tells little."""


class EvaluationsFile(FollowedFile):
    """The evaluations of a run, in the order in which they were finished.

    Args: path: `eval.jsonl`. It may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.found: list[EvalSummary] = []

    def read_new(self) -> list[EvalSummary]:
        """Those since the last call. Raises `ResultsUnusable`, which names the line."""
        new = [summary_of(line, f"{self.path} line {self.number}") for line in self.read()]
        self.found += new
        return new

    def lifts(self) -> Iterator[tuple[str, Lift, int, int]]:
        """Task, change of `SHOWN` from the first to the last evaluation, number of items in both,
        and of those that one of them lost."""
        for task in dict.fromkeys(summary.task for summary in self.found):
            of_task = [summary for summary in self.found if summary.task == task]
            try:
                first, last = (
                    read_result(details_path(summary, self.path))
                    for summary in (of_task[0], of_task[-1])
                )
                comparison = compare(first, last)
            except (ResultsUnusable, NotComparable):
                continue  # a file was removed, or the options changed when the run was resumed
            if len(of_task) > 1:
                yield from (
                    (task, lift, comparison.items, _chosen(last) - comparison.items)
                    for lift in comparison.lifts
                    if lift.metric == SHOWN
                )


def _chosen(summary: EvalSummary) -> int:
    """Number of items, with those that could not be evaluated."""
    return summary.item_count + sum(summary.left_out.values())


def _items_text(items: int, lost: int) -> str:
    """`15 held-out items`; `9 of 15 held-out items (6 lost: see evaluation.item_lost)`."""
    if not lost:
        return f"{items} held-out items"
    return f"{items} of {items + lost} held-out items ({lost} lost: see evaluation.item_lost)"


def evaluation_line(summary: EvalSummary) -> str:
    """`evaluation of arithmetic after 0 steps: pass@1 0.312 (0.250 to 0.375), 20 items x 8`."""
    after = "" if summary.step is None else f" after {summary.step} steps"
    value = summary.metrics.get(SHOWN)
    shown = "" if value is None else f"{SHOWN} {value:.3f}"
    interval = summary.intervals.get(SHOWN)
    between = f" ({interval.low:.3f} to {interval.high:.3f})" if interval else ""
    items = _items_text(summary.item_count, _chosen(summary) - summary.item_count)
    return (
        f"evaluation of {summary.task}{after}: {shown}{between}, "
        f"{items} x {summary.samples}, {summary.duration_s:.1f} s"
    )


def lift_text(task: str, lift: Lift, items: int, lost: int) -> str:
    """`arithmetic: pass@1 0.312 -> 0.744 on 20 held-out items, +0.432 (0.355 to 0.510)`."""
    interval = lift.interval
    chance = "" if lift.is_clear else ", may be chance"
    between = f" ({interval.low:+.3f} to {interval.high:+.3f}{chance})" if interval else ""
    return (
        f"{task}: {lift.metric} {lift.before:.3f} to {lift.after:.3f} on "
        f"{_items_text(items, lost)}, {lift.change:+.3f}{between}"
    )


def few_items_warning(task: str, items: int, lost: int) -> str | None:
    """The line to show if an evaluation had few items, and lost none."""
    if lost or items >= FEW_ITEMS:
        return None
    return (
        f"{task}: {items} held-out items say little about the change; raise --env.held-out, give "
        "more rows, or name other rows with --env.eval-data"
    )


class Evaluations:
    """The evaluations of a run by their steps. Those of other models, which have no step, are left
    out. Of two at one step, the later one counts."""

    def __init__(self, summaries: Iterable[EvalSummary]) -> None:
        self._series: dict[str, dict[int, EvalSummary]] = {}
        found = [one for one in summaries if one.step is not None]
        temperatures: dict[str, set[float]] = {}
        for one in found:
            temperatures.setdefault(one.task, set()).add(one.temperature)
        for one in found:
            name = _name(one, has_several=len(temperatures[one.task]) > 1)
            self._series.setdefault(name, {})[one.step or 0] = one

    @classmethod
    def read(cls, path: Path) -> Evaluations:
        """Raises `ResultsUnusable`, which names the line."""
        return cls(read_summaries(path) if path.exists() else ())

    @property
    def curves(self) -> dict[str, list[Point]]:
        """`pass@k` and `mean@k` by names such as `eval/gsm8k/pass@1`."""
        return {
            name: [(step, one.metrics[metric]) for step, one in series if metric in one.metrics]
            for name, metric, series in self._over_steps()
        }

    @property
    def intervals(self) -> dict[str, list[Interval]]:
        return {
            name: [(s, *one.intervals[metric]) for s, one in series if metric in one.intervals]
            for name, metric, series in self._over_steps()
        }

    def _over_steps(self) -> Iterator[tuple[str, str, list[tuple[int, EvalSummary]]]]:
        """Name of the curve, metric, and the evaluations in order of their steps."""
        for name, series in self._series.items():
            for metric in _metrics(series.values()):
                yield f"{METRICS_PREFIX}/{name}/{metric}", metric, sorted(series.items())

    @property
    def facts(self) -> dict[str, str]:
        """The first metric of each task, at the first and at the last evaluation."""
        found = {}
        for name, series in self._series.items():
            metric = next(iter(_metrics(series.values())), None)
            if metric is None:
                continue
            ends = [series[step] for step in dict.fromkeys((min(series), max(series)))]
            found[f"{metric} on {name}"] = " → ".join(_value(one, metric) for one in ends)
        return found


def _name(one: EvalSummary, has_several: bool) -> str:
    """The task, with the temperature if the task is evaluated at several ones."""
    if not has_several:
        return one.task
    return f"{one.task} " + (f"at {one.temperature:g}" if one.temperature else "greedy")


def _metrics(series: Iterable[EvalSummary]) -> list[str]:
    return [*dict.fromkeys(name for one in series for name in one.metrics if "@" in name)]


def _value(one: EvalSummary, metric: str) -> str:
    interval = one.intervals.get(metric)
    ends = f" ({interval.low:.2f} to {interval.high:.2f})" if interval else ""
    return f"{one.metrics[metric]:.2f}{ends}" if metric in one.metrics else "?"
