"""Curves and facts of the evaluations that `eval.jsonl` of a run holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from grpo_core.evaluation.results import METRICS_PREFIX, EvalSummary, read_summaries
from grpo_core.rollouts.page.encode import Interval, Point


class Evaluations:
    """The evaluations of a run by their steps. Those of other models, which have no step, are left
    out. Of two at one step, the later one counts."""

    def __init__(self, summaries: Iterable[EvalSummary]) -> None:
        self._series: dict[str, dict[int, EvalSummary]] = {}
        found = [one for one in summaries if one.step is not None]
        for one in found:
            self._series.setdefault(_name(one, found), {})[one.step or 0] = one

    @classmethod
    def read(cls, path: Path) -> Evaluations:
        """None if there is no file. Raises `ResultsUnusable`, which names the line."""
        return cls(read_summaries(path) if path.exists() else ())

    @property
    def curves(self) -> dict[str, list[Point]]:
        """`pass@k` and `mean@k` by names such as `eval/gsm8k/pass@1`."""
        return {
            f"{METRICS_PREFIX}/{name}/{metric}": [
                (step, one.metrics[metric])
                for step, one in sorted(series.items())
                if metric in one.metrics
            ]
            for name, series in self._series.items()
            for metric in _metrics(series.values())
        }

    @property
    def intervals(self) -> dict[str, list[Interval]]:
        return {
            f"{METRICS_PREFIX}/{name}/{metric}": [
                (step, *one.intervals[metric])
                for step, one in sorted(series.items())
                if metric in one.intervals
            ]
            for name, series in self._series.items()
            for metric in _metrics(series.values())
        }

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


def _name(one: EvalSummary, others: Sequence[EvalSummary]) -> str:
    """The task, with the temperature if the task is evaluated at several ones."""
    if len({other.temperature for other in others if other.task == one.task}) == 1:
        return one.task
    return f"{one.task} " + (f"at {one.temperature:g}" if one.temperature else "greedy")


def _metrics(series: Iterable[EvalSummary]) -> list[str]:
    return [*dict.fromkeys(name for one in series for name in one.metrics if "@" in name)]


def _value(one: EvalSummary, metric: str) -> str:
    interval = one.intervals.get(metric)
    ends = f" ({interval.low:.2f} to {interval.high:.2f})" if interval else ""
    return f"{one.metrics[metric]:.2f}{ends}" if metric in one.metrics else "?"
