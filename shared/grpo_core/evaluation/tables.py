"""Compares two evaluations, and shows evaluations in a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from statistics import fmean

from grpo_core.errors import GrpoError
from grpo_core.evaluation.results import MEAN, PASS, EvalItem, EvalResult, EvalSummary
from grpo_core.evaluation.statistics import Interval, difference_interval


class NotComparable(GrpoError):
    """Two evaluations have no item in common, or differ in how answers were sampled."""


@dataclass(frozen=True)
class Lift:
    """The change of one metric. `interval`: of the change; None if it cannot be told."""

    metric: str
    before: float
    after: float
    interval: Interval | None

    @property
    def change(self) -> float:
        return self.after - self.before

    @property
    def is_clear(self) -> bool:
        """The interval excludes 0."""
        return self.interval is not None and not self.interval.low <= 0.0 <= self.interval.high


@dataclass(frozen=True)
class Comparison:
    """Lifts on the items that both evaluations have. `unpaired`: items that only one has."""

    task: str
    lifts: tuple[Lift, ...]
    items: int
    unpaired: int


def compare(before: EvalResult, after: EvalResult, seed: int = 0) -> Comparison:
    """The lift of each `pass@k` and `mean@k` that both have, with its paired interval.

    Raises:
        NotComparable: the tasks, temperatures or numbers of answers differ, or no item is in both.
    """
    differing = [
        f"{name} {old} and {new}"
        for name in ("task", "temperature", "samples")
        if (old := getattr(before, name)) != (new := getattr(after, name))
    ]
    if differing:
        raise NotComparable(
            f"{after.task}: {'; '.join(differing)}; evaluate both with the same options"
        )
    first = {item.item: item for item in before.items}
    pairs = [(first[item.item], item) for item in after.items if item.item in first]
    if not pairs:
        raise NotComparable(
            f"{after.task}: no item in common; evaluate both on the same data with the same --seed"
        )
    lifts = []
    for name in after.metrics:
        if "@" in name and name in before.metrics:
            old, new = ([_value(item, name) for item in side] for side in zip(*pairs, strict=True))
            interval = difference_interval(old, new, seed)
            lifts.append(Lift(name, fmean(old), fmean(new), interval))
    return Comparison(
        task=after.task,
        lifts=tuple(lifts),
        items=len(pairs),
        unpaired=len(before.items) + len(after.items) - 2 * len(pairs),
    )


def _value(item: EvalItem, metric: str) -> float:
    name, _, k = metric.partition("@")
    return {PASS: item.pass_at, MEAN: item.mean_at}[name](int(k))


COLUMNS = 80
_NAME_WIDTH, _VALUE_WIDTH, _INTERVAL_WIDTH = 16, 9, 18
_LARGE = 100.0
"""Numbers from here on are lengths in tokens; three decimals would say nothing."""


def table_lines(result: EvalSummary) -> list[str]:
    """What was evaluated, one line per metric, and what was left out. Only the path of a model may
    be longer than a line."""
    between = {name: f"{one.low:.3f} to {one.high:.3f}" for name, one in result.intervals.items()}
    lines = [
        result.task + (f": {result.model}" if result.model else ""),
        *_wrapped(f"  {_facts(result)}"),
        _row("metric", "value", "95 % interval", "meaning"),
    ]
    for name, value in result.metrics.items():
        lines.append(_row(name, _number(value), between.get(name, ""), _meaning(name)))
    if result.left_out:
        reasons = ", ".join(f"{count} {reason}" for reason, count in result.left_out.items())
        lines += _wrapped(f"  items left out: {reasons}")
    if len(result.answers_by_version) > 1:
        counts = result.answers_by_version.items()
        listed = ", ".join(f"{count} by {version}" for version, count in counts)
        lines += _wrapped(f"  several policy versions answered: {listed}")
    return lines


def comparison_lines(comparison: Comparison) -> list[str]:
    """One line per metric: before, after, and the change with its interval."""
    items = f"{comparison.items} items in both"
    unpaired = f", {comparison.unpaired} in only one" if comparison.unpaired else ""
    lines = [
        f"{comparison.task}: lift, paired by item ({items}{unpaired})",
        _lift_row("metric", "before", "after", "change", "95 % interval", ""),
    ]
    for lift in comparison.lifts:
        interval = f"{lift.interval.low:+.3f} to {lift.interval.high:+.3f}" if lift.interval else ""
        verdict = "" if lift.is_clear or not lift.interval else "may be chance"
        values = _number(lift.before), _number(lift.after), f"{lift.change:+.3f}"
        lines.append(_lift_row(lift.metric, *values, interval, verdict))
    return lines


def _facts(result: EvalSummary) -> str:
    versions = " to ".join(dict.fromkeys(map(str, result.versions or ())))
    facts = (
        f"{result.item_count} items",
        "1 answer each" if result.samples == 1 else f"{result.samples} answers each",
        f"temperature {result.temperature:g}" if result.temperature else "greedy",
        "" if result.step is None else f"step {result.step}",
        f"weights {versions}" if versions else "",
        f"{result.duration_s:.1f} s",
    )
    return ", ".join(filter(None, facts))


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, subsequent_indent="  ", break_on_hyphens=False)


def _row(name: str, value: str, interval: str, meaning: str) -> str:
    return (
        f"  {name:<{_NAME_WIDTH}}{value:>{_VALUE_WIDTH}}  {interval:<{_INTERVAL_WIDTH}}{meaning}"
    ).rstrip()


def _meaning(metric: str) -> str:
    name, _, k = metric.partition("@")
    several = k not in ("", "1")
    if name == PASS:
        return f"items with a right answer in {k}" if several else "share of right answers"
    if name == MEAN:
        return f"mean reward of the best of {k}" if several else "mean reward"
    if metric.startswith("part/"):
        return "mean of a reward part"
    return {"length": "mean tokens per answer", "truncated": "share cut off"}.get(metric, "")


def _number(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= _LARGE else f"{value:.3f}"


def _lift_row(name: str, before: str, after: str, change: str, interval: str, verdict: str) -> str:
    return f"  {name:<10}{before:>9}{after:>9}{change:>9}  {interval:<20}{verdict}".rstrip()
