from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from grpo_local.progress import HEADER_EVERY_STEPS, StepTable, header_lines, step_line
from grpo_local.screen import Screen
from tests.unit.local.records import record
from tests.unit.local.shown import Shown

TERMINAL_WIDTH = 100
ABSENT = ("alignment/diff_abs_mean", "staleness/mean", "rollout/generation_time", "grpo/mean_ratio")


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


def test_unmeasured_values_are_dashes() -> None:
    assert step_line(record(1, **dict.fromkeys(ABSENT))).split().count("-") == len(ABSENT)


@given(
    step=st.integers(1, 999),
    reward=st.floats(-99, 99),
    loss=st.floats(-12, 12),
    speed=st.floats(0, 123456),
    seconds=st.floats(0, 119.99),
    fraction=st.floats(0, 1),
)
def test_lines_and_headers_are_equally_wide_and_fit_a_terminal(
    step: int, reward: float, loss: float, speed: float, seconds: float, fraction: float
) -> None:
    changes = {"steps": 999, "reward/mean": reward, "train/loss": loss}
    changes |= {"throughput/tokens_per_s": speed, "train/data_fetch_time": seconds}
    changes |= {"train/compute_time": seconds, "grpo/clipped_fraction": fraction}
    changes |= {"alignment/diff_abs_mean": 1e-9 + seconds, "staleness/mean": 99 * fraction}
    lines = [*header_lines(), step_line(record(step, **changes))]
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= TERMINAL_WIDTH


def test_the_header_comes_first_and_every_twenty_steps() -> None:
    table = StepTable()
    is_header = [flag for step in range(1, 42) for _, flag in table.lines(record(step))]
    header, rows = [True] * 2, [False] * HEADER_EVERY_STEPS
    assert is_header == [*header, *rows, *header, *rows, *header, False]


def test_a_pipe_gets_whole_plain_lines() -> None:
    shown = Shown()
    long = "see [run]/logs/trainer.log :warning: " + "x" * 200
    shown.line(long, style="bold red")
    with shown.activity("starting"):
        pass
    shown.failure("what\nwhere")
    assert shown.out == f"{long}\nstarting\n"
    assert shown.err == "what\nwhere\n"


def test_a_terminal_gets_colours() -> None:
    out = io.StringIO()
    Screen(Console(file=out, force_terminal=True, color_system="standard")).line("x", style="red")
    assert out.getvalue() == "\x1b[31mx\x1b[0m\n"
