"""The reward of several modes, by step and by time. Importing this imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_local.modes import ModeName
from grpo_local.report.drawing import Axes, Figure, FigureCanvasAgg
from grpo_local.report.metrics_file import StepRecord
from grpo_local.report.plots import average_window, moving_average

SIZE_INCHES = (12.0, 4.8)
DOTS_PER_INCH = 150


@dataclass(frozen=True)
class Style:
    colour: str
    dashes: str


STYLES: dict[ModeName, Style] = {
    "shared_vllm": Style("#0072B2", "-"),
    "lora_only": Style("#D55E00", "--"),
    "lora_restart": Style("#009E73", "-."),
    "none": Style("#CC79A7", ":"),
}
"""Colours of Okabe and Ito, which colour-blind readers tell apart; dashes do without colour."""


@dataclass(frozen=True)
class Curve:
    mode: ModeName
    records: Sequence[StepRecord]


def draw_comparison(curves: Sequence[Curve], title: str, path: Path) -> None:
    """Write a PNG: moving averages of the reward, over steps on the left, over seconds right."""
    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for curve in curves:
        _draw(by_step, curve, [record.step for record in curve.records])
        _draw(by_time, curve, [record.time_s for record in curve.records])
    by_step.set_xlabel("training step", fontsize=12)
    by_time.set_xlabel("seconds since the first step began", fontsize=12)
    by_step.set_ylabel("mean reward (moving average)", fontsize=12)
    for axes in (by_step, by_time):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=11)
    by_step.legend(frameon=False, loc="best", fontsize=11)
    figure.suptitle(title, fontsize=13)
    figure.savefig(path, format="png")


def _draw(axes: Axes, curve: Curve, positions: Sequence[float]) -> None:
    style = STYLES[curve.mode]
    rewards = [record.reward_mean for record in curve.records]
    axes.plot(positions, rewards, color=style.colour, alpha=0.2, linewidth=0.8)
    axes.plot(
        positions,
        moving_average(rewards, average_window(len(rewards))),
        color=style.colour,
        linestyle=style.dashes,
        linewidth=2.4,
        label=curve.mode,
    )
