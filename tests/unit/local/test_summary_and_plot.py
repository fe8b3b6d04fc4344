from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_local.modes import MODES
from grpo_local.plot import average_window, draw_reward_curve, moving_average
from grpo_local.run_directory import RunDirectory
from grpo_local.summary import summarise, summary_lines
from tests.unit.local.records import record

IMPORT_IMPATIENTLY = """
import sys, threading

class AtOnce(threading.Timer):
    def start(self):
        self.function()

threading.Timer = AtOnce  # matplotlib's warning waits for 5 s
import grpo_local.plot, grpo_local.comparison_plot
"""


def test_summary_by_hand() -> None:
    # rewards 0.1, 0.2, ... 4.0; a tenth of 40 steps is 4
    records = [record(step, **{"train/data_fetch_time": step % 2}) for step in range(1, 41)]
    summary = summarise(records, total_s=100.0, training_s=60.0)
    assert (summary.steps, summary.tenth_steps) == (40, 4)
    assert summary.first_reward == pytest.approx(0.25)
    assert summary.last_reward == pytest.approx(3.85)
    assert summary.fetch_s == pytest.approx(0.5)
    assert summary.generation_s == pytest.approx(0.8)
    assert summary.step_s == pytest.approx(1.5)


def test_a_summary_of_few_steps_compares_single_ones_and_leaves_out_what_nobody_said() -> None:
    said = [record(1), record(2, **{"rollout/generation_time": None})]
    summary = summarise(said, 9.0, 3.0)
    assert (summary.tenth_steps, summary.generation_s) == (1, 0.8)
    assert (summary.first_reward, summary.last_reward) == (0.1, 0.2)
    silent = summarise(said[1:], 9.0, 3.0)
    lines = summary_lines(silent, RunDirectory(Path("runs/one")), MODES["lora_only"], "twice")
    assert "generate -," in "\n".join(lines)
    assert "weights:  twice" in lines
    assert "model:    runs/one/checkpoints/final_adapter" in lines


@given(values=st.lists(st.floats(-1, 1), min_size=1, max_size=20), window=st.integers(1, 25))
def test_the_moving_average_looks_back_only(values: list[float], window: int) -> None:
    averages = moving_average(values, window)
    assert len(averages) == len(values)
    for end, average in enumerate(averages, start=1):
        seen = values[:end][-window:]
        assert average == pytest.approx(sum(seen) / len(seen))
    assert (average_window(5), average_window(60)) == (3, 6)


@pytest.mark.parametrize("steps", [1, 60])
def test_the_plot_is_a_png_of_sensible_size(tmp_path: Path, steps: int) -> None:
    path = tmp_path / "reward.png"
    draw_reward_curve(range(1, steps + 1), [step / 60 for step in range(steps)], "title", path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", data[16:24]) == (1200, 675)
    assert 5_000 < len(data) < 500_000


@pytest.mark.full
def test_nothing_is_said_of_the_font_cache_that_a_new_machine_lacks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_IMPATIENTLY],
        env={**os.environ, "MPLCONFIGDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert list(tmp_path.glob("fontlist-*")), "it was not built"
