"""Plots of a run."""

from __future__ import annotations

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from grpo_runs.report.plots import COLOUR, _draw_curve


def test_the_curve_of_a_single_step_is_seen() -> None:
    figure = Figure()
    axes = figure.add_subplot()
    axes.axis("off")
    _draw_curve(axes, "reward", COLOUR, "-", [1], [0.5])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    assert np.asarray(canvas.buffer_rgba()).min() < 255  # type: ignore[no-untyped-call]
