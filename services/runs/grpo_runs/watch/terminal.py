"""The state of a run on one screen of a terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from grpo_core.rollouts.page.encode import EVALUATION, REWARD, STALENESS
from grpo_core.rollouts.record import printable
from grpo_runs.process.stack import MIB
from grpo_runs.report.evaluations import SHOWN as OF_EVALUATION
from grpo_runs.report.steps import seconds
from grpo_runs.watch.api import curves_of
from grpo_runs.watch.live_run import LiveRun, duration
from grpo_runs.watch.metrics_log import LOSS

HEADINGS = 9  # lines: those of the run, two of the numbers, curves and warnings, and a spare one
EVERY_S = 1.0
POLL_S = 0.1
BARS = "▁▂▃▄▅▆▇█"
PARTS = {"wait": "wait for data", "train": "train", "publish": "publish", "save": "save"}
COLOURS = {"wait": "yellow", "train": "blue", "publish": "magenta", "save": "green"}
LEVELS = {"error": "bold red", "warning": "yellow"}
SIDE_BY_SIDE, WIDE = 76, 100
"""Columns from which services and times are side by side, and from which details and bars are."""
FEWEST_WARNINGS = 3  # lines for them, if there are some


def watch_in_terminal(live: LiveRun, console: Console | None = None) -> None:
    """Show the run until q or Ctrl-C."""
    console = console or Console()
    try:
        with _keys() as key, Live(console=console, screen=True, auto_refresh=False) as display:
            while True:
                size = console.size
                display.update(screen_of(live, size, time.time()), refresh=True)
                until = time.monotonic() + EVERY_S
                while time.monotonic() < until and console.size == size:
                    if key(POLL_S) == "q":
                        return
    except KeyboardInterrupt:
        pass


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Keys arrive at once and are not shown. Gives a function that waits so many seconds for one,
    and returns "" without one."""

    def no_key(within_s: float) -> str:
        time.sleep(within_s)
        return ""

    if not sys.stdin.isatty():
        yield no_key
        return
    before = termios.tcgetattr(sys.stdin)

    def key(within_s: float) -> str:
        is_pressed = select.select([sys.stdin], [], [], within_s)[0]
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if is_pressed else ""

    tty.setcbreak(sys.stdin)
    try:
        yield key
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def screen_of(live: LiveRun, size: tuple[int, int], now: float) -> RenderableType:
    """Args:
    size: columns and rows
    now: Unix time in seconds
    """
    state = live.state()
    width, height = size
    curves = [one for one in curves_of(live, "step", 1000) if _is_shown(one["name"])]
    services = _services(state["services"], now, has_details=width >= WIDE)
    times = _times(state, longest_bar=16 if width >= WIDE else 0)
    upper: RenderableType
    rows = len(state["services"]) + 2, len(state["times"]) + 2
    if width < SIDE_BY_SIDE:
        upper, used = Group(services, times), sum(rows)
    else:
        upper, used = _beside(services, times), max(rows)
    alerts = [
        Text(f"Alert: {one['text']} {one['advice']}", "bold red", no_wrap=True, overflow="ellipsis")
        for one in state["alerts"]
    ]
    left = height - used - len(alerts) - HEADINGS
    some = min(FEWEST_WARNINGS, max(1, len(state["warnings"])))
    curves = curves[: max(1, left - some)]
    warnings = _warnings(state["warnings"], max(1, left - len(curves)))
    head = _head(live, state, width)
    numbers = Text(_numbers(state), no_wrap=True, overflow="ellipsis")
    return Group(head, *alerts, upper, numbers, _curves(curves, width - 4), warnings)


def _is_shown(name: str) -> bool:
    is_evaluation = name.startswith(EVALUATION) and name.endswith(f"/{OF_EVALUATION}")
    return name in (REWARD, LOSS, STALENESS) or is_evaluation


def _beside(left: RenderableType, right: RenderableType) -> RenderableType:
    table = Table.grid(Column(ratio=1), Column(), expand=True)
    table.add_row(left, right)
    return table


def _head(live: LiveRun, state: Mapping[str, Any], width: int) -> RenderableType:
    step, steps = state["step"], state["steps"]
    of = f"step {step} of {steps}" if steps else "no step yet"
    rest = f", {state['eta_text']}" if state["eta_text"] else ""
    text = Text(f"{live.name}  ", "bold")
    text.append(f"{state['state']}, {of}{rest}", "not bold")
    bar = ProgressBar(total=steps or 1, completed=step if steps else 0, width=width)
    return Group(text, bar, "")


def _services(
    services: Sequence[Mapping[str, Any]], now: float, has_details: bool
) -> RenderableType:
    table = Table(box=None, padding=(0, 1), title="Services", title_justify="left")
    for name in ("service", "stage", "for", "memory"):
        side: JustifyMethod = "right" if name in ("for", "memory") else "left"
        table.add_column(name, justify=side, no_wrap=name != "stage")  # which alone is cut
    for one in services:
        since, memory = one["since"], one["memory_bytes"]
        detail = f" ({one['detail']})" if one["detail"] and has_details else ""
        table.add_row(
            one["name"],
            Text(f"{one['stage']}{detail}", no_wrap=True, overflow="ellipsis"),
            duration(max(0.0, now - since)) if since else "",
            f"{memory / MIB:.0f} MiB" if memory else "",
        )
    return table


def _times(state: Mapping[str, Any], longest_bar: int) -> RenderableType:
    table = Table(box=None, padding=(0, 1), title="Time of a step (s)", title_justify="left")
    for name in ("part", "newest", "median", ""):
        table.add_column(name, justify="right" if name in ("newest", "median") else "left")
    times = state["times"]
    longest = max((part["median"] for part in times.values()), default=0.0)
    for name, part in times.items():
        bar = "█" * round(longest_bar * part["median"] / longest) if longest else ""
        table.add_row(
            PARTS[name], seconds(part["newest"]), seconds(part["median"]), Text(bar, COLOURS[name])
        )
    return table


def _numbers(state: Mapping[str, Any]) -> str:
    found = {"tokens per second": state["tokens_per_s"], "staleness": state["staleness"]}
    found |= {name.replace("_", " "): value for name, value in (state["queue"] or {}).items()}
    numbers = (f"{name} {value:.4g}" for name, value in found.items() if value is not None)
    speed = state["training_speed"]
    return ", ".join(numbers) + (f"\ntraining {speed}" if speed else "")


def _curves(curves: Sequence[Mapping[str, Any]], width: int) -> RenderableType:
    table = Table(box=None, padding=(0, 1), title="Curves", title_justify="left")
    for name in ("", "first", "newest", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for curve in curves:
        values = [point[1] for point in curve["points"]]
        if values:
            line = sparkline(values, max(10, width - 58))
            table.add_row(curve["title"], f"{values[0]:.3g}", f"{values[-1]:.3g}", line)
    return table


def sparkline(values: Sequence[float], width: int) -> str:
    """A character for each of `width` equal parts: their means, from the lowest to the highest."""
    count = min(width, len(values))
    cuts = [len(values) * at // count for at in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def _warnings(warnings: Sequence[Mapping[str, Any]], lines: int) -> RenderableType:
    text = Text("Warnings and errors\n", "italic", no_wrap=True, overflow="ellipsis")
    if not warnings:
        text.append("none", "not italic")
    for one in sorted(warnings, key=lambda found: -float(found["time"]))[:lines]:
        at = time.strftime("%H:%M:%S", time.localtime(one["time"]))
        times = f", {one['count']} times," if one["count"] > 1 else ""
        line = f"{at} {one['level']} {one['service']} {one['event']}{times} {one['text']}\n"
        text.append(printable(line.rstrip()) + "\n", LEVELS.get(one["level"], ""))
    return text
