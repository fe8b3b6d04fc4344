"""The reward curve. Importing this imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from grpo_local.report.drawing import Figure, FigureCanvasAgg, MaxNLocator

SIZE_INCHES = (8.0, 4.5)
DOTS_PER_INCH = 150
COLOUR = "#1f5fa8"
SHORTEST_WINDOW = 3


def average_window(steps: int) -> int:
    """Steps that the moving average covers: a tenth of the run, never less than 3."""
    return max(SHORTEST_WINDOW, steps // 10)


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and those before it, `window` in all; fewer at the start."""
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def draw_reward_curve(
    steps: Sequence[int], rewards: Sequence[float], title: str, path: Path
) -> None:
    """Write a PNG of the mean reward per training step and its moving average."""
    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    window = average_window(len(rewards))
    axes.plot(steps, rewards, color=COLOUR, alpha=0.35, linewidth=1.0, marker=".", label="one step")
    axes.plot(
        steps,
        moving_average(rewards, window),
        color=COLOUR,
        linewidth=2.2,
        label=f"moving average over {window} steps",
    )
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("training step (optimizer updates)")
    axes.set_ylabel("mean reward (score per completion)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="best")
    figure.savefig(path, format="png")
