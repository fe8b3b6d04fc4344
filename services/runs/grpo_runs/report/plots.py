"""Plots the curves of one run or of several modes. Importing this module imports matplotlib."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from grpo_core.rollouts.page.encode import Point
from grpo_core.tree.weights import ModeName
from grpo_runs.report.steps import StepRecord

# On its first import matplotlib builds a cache of fonts and logs a warning, which would look like a
# problem of the run.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

DOTS_PER_INCH = 150
COLOUR = "#1f5fa8"
SHORTEST_WINDOW = 3


STYLES: Mapping[ModeName, tuple[str, str]] = {
    "shared_vllm": ("#0072B2", "-"),
    "lora_only": ("#D55E00", "--"),
    "lora_restart": ("#009E73", "-."),
    "none": ("#CC79A7", ":"),
}
"""Colours of Okabe and Ito, which colour-blind readers can distinguish; dashes work without colour.
"""


def average_window(steps: int) -> int:
    """Steps of the moving average: a tenth of the run, at least 3; fewer at the start."""
    return max(SHORTEST_WINDOW, steps // 10)


def draw_reward_curve(records: Sequence[StepRecord], title: str, path: Path) -> None:
    """Write a PNG of the mean reward per training step and its moving average."""
    figure = _figure((8.0, 4.5))
    axes = figure.add_subplot()
    steps = [record.step for record in records]
    rewards = [record.reward_mean for record in records]
    label = f"moving average over {average_window(len(rewards))} steps"
    _draw_curve(axes, label, COLOUR, "-", steps, rewards)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("training step (optimizer updates)")
    axes.set_ylabel("mean reward (score per completion)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    _open_frame(axes)
    axes.legend(frameon=False, loc="best")
    figure.savefig(path, format="png")


def draw_comparison(runs: Mapping[ModeName, Sequence[StepRecord]], title: str, path: Path) -> None:
    """Write a PNG of each mode's mean reward, over steps on the left and over time on the right."""
    figure = _figure((12.0, 4.8))
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for mode, records in runs.items():
        rewards = [record.reward_mean for record in records]
        _draw_curve(by_step, mode, *STYLES[mode], [record.step for record in records], rewards)
        _draw_curve(by_time, mode, *STYLES[mode], [record.time_s for record in records], rewards)
    by_step.set_xlabel("training step", fontsize=12)
    by_time.set_xlabel("seconds since the first step began", fontsize=12)
    by_step.set_ylabel("mean reward (moving average)", fontsize=12)
    for axes in (by_step, by_time):
        _open_frame(axes)
        axes.tick_params(labelsize=11)
    by_step.legend(frameon=False, loc="best", fontsize=11)
    figure.suptitle(title, fontsize=13)
    figure.savefig(path, format="png")


def draw_panels(
    panels: Mapping[str, Mapping[str, Sequence[Point]]], x_label: str, path: Path
) -> None:
    """Write a PNG with two panels a row, each with curves by their labels. Curves without points
    are left out."""
    figure = _figure((10.0, 6.5))
    places = figure.subplots(-(-len(panels) // 2), 2).flat
    for axes, (title, curves) in zip(places, panels.items(), strict=True):
        for label, points in curves.items():
            if points:
                axes.plot(*zip(*points, strict=True), label=label, marker=".")
        axes.set_title(title, fontsize=11)
        axes.set_xlabel(x_label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _open_frame(axes)
        if any(curves.values()):
            axes.legend(fontsize="small", frameon=False)
    figure.savefig(path, format="png")


def _figure(size_inches: tuple[float, float]) -> Figure:
    return Figure(figsize=size_inches, dpi=DOTS_PER_INCH, layout="constrained")


def _open_frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def _draw_curve(
    axes: Axes,
    label: str,
    colour: str,
    dashes: str,
    positions: Sequence[float],
    rewards: Sequence[float],
) -> None:
    """The moving average, and faintly each value."""
    window, count = average_window(len(rewards)), len(rewards)
    averages = [fmean(rewards[max(0, end - window) : end]) for end in range(1, count + 1)]
    # A single value has a dot, and no line.
    axes.plot(positions, rewards, ".-", color=colour, alpha=0.3, linewidth=0.8, markersize=3)
    axes.plot(positions, averages, dashes, color=colour, linewidth=2.4, label=label)
