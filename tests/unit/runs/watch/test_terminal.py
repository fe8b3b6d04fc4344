"""The state of a run on one screen of a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import termios
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from grpo_runs.process.records import ProcessRecords
from grpo_runs.process.stack import MIB
from grpo_runs.run_directory import RunDirectory
from grpo_runs.watch.live_run import LiveRun
from grpo_runs.watch.terminal import _beside, _services, _times, screen_of, sparkline
from tests.unit.runs.records import take_steps


@pytest.mark.parametrize(("width", "height"), [(60, 40), (80, 24), (120, 40)])
def test_one_screen(tmp_path: Path, width: int, height: int) -> None:
    run = RunDirectory(tmp_path)
    for directory in (run.logs, run.checkpoints):
        directory.mkdir()
    processes = ProcessRecords(run)
    processes.watch({"trainer": processes._content["runner"]["pid"]})
    stage = {"stage": "compute", "since": 970.0, "pid": processes._content["runner"]["pid"]}
    (run.checkpoints / "stage.json").write_text(json.dumps(stage))
    (run.logs / "trainer.log").write_text(
        "2026-01-01T10:00:02 [warning  ] metric.out_of_range   metric=[bold]\\x07\n"
    )
    take_steps(run, *range(1, 11))

    console = Console(width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(screen_of(LiveRun("mine", run), console.size, now=1000.0))
    shown = captured.get()
    assert "training, step 10 of 40, about 45 s left" in " ".join(shown.split())
    assert "trainer  training  30 s" in " ".join(shown.split("\n")).replace("   ", "  ")
    assert "Mean reward" in shown
    assert "training 3,086 tokens/s, MFU 41.2 %" in shown
    assert "metric.out_of_range metric=[bold]" in " ".join(shown.split())
    assert "train/loss" in shown
    lines = shown.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= height


def test_only_the_stage_of_a_service_is_cut() -> None:
    facts = {"since": 900.0, "memory_bytes": 1144 * MIB, "detail": "3 groups in progress; " * 4}
    service = {"name": "environment-arithmetic", "stage": "sampling", **facts}
    console = Console(width=110, height=40, force_terminal=True, color_system=None)
    with console.capture() as captured:
        times = _times({"times": {"train": {"newest": 1.0, "median": 1.0}}}, longest_bar=16)
        console.print(_beside(_services([service], 1000.0, has_details=True), times))
    line = captured.get().splitlines()[2]
    assert line.split()[0] == "environment-arithmetic"
    assert "sampling (3 groups" in line
    assert "…  2 min  1144 MiB" in line


def test_q_ends_it_and_the_terminal_is_as_before(tmp_path: Path) -> None:
    """At a pseudo-terminal."""
    command = [sys.executable, "-m", "grpo_runs", "watch", str(tmp_path), "--terminal"]
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        shown = b""
        while b"Services" not in shown:
            shown += os.read(ours, 4096)
        os.write(ours, b"q")
        drain = threading.Thread(target=_read_all, args=(ours,), daemon=True)
        drain.start()
        assert process.wait() == 0
    assert termios.tcgetattr(theirs)[3] == before[3]
    os.close(theirs)
    drain.join()
    os.close(ours)


def _read_all(file: int) -> None:
    with suppress(OSError):  # the other end is closed
        while os.read(file, 4096):
            pass


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([3], 10) == "▁"
