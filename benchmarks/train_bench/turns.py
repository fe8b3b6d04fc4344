"""Runs the sides of a comparison in turns, each measurement in a process of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import structlog

Reading = dict[str, Any]
_log = structlog.get_logger()


def in_turn(
    name: str, rounds: int, sides: Mapping[str, Callable[[], Reading]]
) -> dict[str, list[Reading]]:
    """Every side's readings, by side."""
    found: dict[str, list[Reading]] = {side: [] for side in sides}
    for turn in range(rounds):
        for side, measure in sides.items():
            found[side].append(measure())
            numbers = {k: v for k, v in found[side][-1].items() if isinstance(v, float | int)}
            _log.info("measured", name=name, side=side, turn=turn, **numbers)
    return found


def json_of(command: Sequence[str]) -> Reading:
    """The last line that the command prints, parsed."""
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: Reading = json.loads(done.stdout.splitlines()[-1])
    return found


def values(readings: Sequence[Reading], key: str, scale: float = 1.0) -> list[float]:
    """In ascending order."""
    return sorted(reading[key] / scale for reading in readings)


def spread(ordered: Sequence[float]) -> str:
    """median (lowest to highest)"""
    return f"{_short(median(ordered))} ({_short(ordered[0])} to {_short(ordered[-1])})"


def goal_of(ratio: float, goal: float | None) -> str:
    if goal is None:
        return ""
    return f"{goal:g}: {'met' if ratio >= goal else '**missed**'}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
