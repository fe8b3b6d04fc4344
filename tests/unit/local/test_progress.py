from __future__ import annotations

import io

import pytest
from rich.console import Console

from grpo_local.progress import HEADER_EVERY_STEPS, StepTable, header_lines, step_line
from grpo_local.screen import Screen
from tests.unit.local.records import record

TERMINAL_WIDTH = 100


def test_a_line_shows_each_value_under_its_title() -> None:
    titles, _ = header_lines()
    shown = dict(zip(titles.split(), step_line(record(3)).split(), strict=True))
    assert shown == {
        "step": "3/40",
        "reward": "0.300",
        "loss": "-0.0123",
        "ratio": "1.002",
        "clip": "2.5",
        "align": "2.5e-06",
        "stale": "0.50",
        "speed": "1234",
        "generate": "0.80",
        "wait": "0.30",
        "train": "0.60",
        "publish": "0.05",
    }


def test_what_was_not_measured_is_a_dash() -> None:
    absent = (
        *("alignment/diff_abs_mean", "staleness/mean", "rollout/generation_time"),
        *("grpo/mean_ratio", "grpo/clipped_fraction"),
    )
    assert step_line(record(1, **dict.fromkeys(absent))).split().count("-") == len(absent)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"step": 999, "steps": 999, "reward/mean": -99.123, "train/loss": -12.3456},
        {
            "throughput/tokens_per_s": 123456.0,
            "train/data_fetch_time": 119.99,
            "train/compute_time": 99.996,
        },
        {"grpo/clipped_fraction": 1.0, "alignment/diff_abs_mean": 12.0, "staleness/mean": 12.5},
    ],
)
def test_lines_and_headers_are_equally_wide_and_fit_a_terminal(changes: dict[str, float]) -> None:
    lines = [*header_lines(), step_line(record(1, **changes))]
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= TERMINAL_WIDTH


def test_the_header_comes_first_and_every_twenty_steps() -> None:
    table = StepTable()
    is_header = [flag for step in range(1, 42) for _, flag in table.lines(record(step))]
    header, rows = [True] * 2, [False] * HEADER_EVERY_STEPS
    assert is_header == [*header, *rows, *header, *rows, *header, False]


def test_a_pipe_gets_whole_plain_lines() -> None:
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(Console(file=out, width=40), Console(file=err, width=40))
    long = "see [run]/logs/trainer.log :warning: " + "x" * 80
    screen.line(long, style="bold red")
    with screen.activity("starting"):
        pass
    screen.failure("what\nwhere")
    assert out.getvalue() == f"{long}\nstarting\n"
    assert err.getvalue() == "what\nwhere\n"


def test_a_terminal_gets_colours() -> None:
    out = io.StringIO()
    Screen(Console(file=out, force_terminal=True, color_system="standard")).line("x", style="red")
    assert out.getvalue() == "\x1b[31mx\x1b[0m\n"
