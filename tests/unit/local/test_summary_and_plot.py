from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_local.modes import MODES
from grpo_local.plot import average_window, draw_reward_curve, moving_average
from grpo_local.run_directory import RunDirectory
from grpo_local.summary import Summary, summarise, summary_lines
from tests.unit.local.records import record


def lines_of(summary: Summary) -> list[str]:
    run = RunDirectory(Path("runs/one"))
    return summary_lines(summary, run, MODES["lora_only"], "published twice")


PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
IMPORT_IMPATIENTLY = """
import importlib, sys, threading

class AtOnce(threading.Timer):
    def start(self):
        self.function()

threading.Timer = AtOnce  # matplotlib's warning waits for 5 s
importlib.import_module(sys.argv[1])
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


def test_a_summary_leaves_out_what_no_environment_said() -> None:
    said = [record(1), record(2, **{"rollout/generation_time": None})]
    assert summarise(said, 9.0, 3.0).generation_s == pytest.approx(0.8)
    silent = summarise(said[1:], 9.0, 3.0)
    assert silent.generation_s is None
    assert "generate -," in "\n".join(lines_of(silent))


def test_summary_of_few_steps_compares_single_steps() -> None:
    summary = summarise([record(1), record(2), record(3)], total_s=9.0, training_s=3.0)
    assert summary.tenth_steps == 1
    assert (summary.first_reward, summary.last_reward) == pytest.approx((0.1, 0.3))


def test_summary_lines_say_what_and_where() -> None:
    summary = summarise([record(1), record(2)], total_s=9.0, training_s=3.0)
    text = "\n".join(lines_of(summary))
    assert "0.100 in the first step, 0.200 in the last step" in text
    assert "2 in 3.0 s; 9.0 s with" in text
    assert "weights:  published twice" in text
    for path in ("reward.png", "metrics.jsonl", "checkpoints/final_adapter", "logs"):
        assert f"runs/one/{path}" in text


def test_moving_average_looks_back_only() -> None:
    assert moving_average([1.0, 3.0, 5.0, 1.0], window=2) == [1.0, 2.0, 4.0, 3.0]
    assert (average_window(5), average_window(60)) == (3, 6)


@pytest.mark.parametrize("steps", [1, 60])
def test_the_plot_is_a_png_of_sensible_size(tmp_path: Path, steps: int) -> None:
    path = tmp_path / "reward.png"
    draw_reward_curve(range(1, steps + 1), [step / 60 for step in range(steps)], "title", path)
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data.startswith(PNG_SIGNATURE)
    assert (width, height) == (1200, 675)
    assert 5_000 < len(data) < 500_000


@pytest.mark.parametrize("module", ["plot", "comparison_plot"])
def test_nothing_is_said_of_the_font_cache_that_a_new_machine_lacks(
    tmp_path: Path, module: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_IMPATIENTLY, f"grpo_local.{module}"],
        env={**os.environ, "MPLCONFIGDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr == ""
    assert list(tmp_path.glob("fontlist-*")), "it was not built"
