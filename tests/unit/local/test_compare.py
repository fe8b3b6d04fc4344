"""`grpo-compare` as a user runs it: real demos with stand-ins for all services but Redis."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.process_table import eventually, is_alive
from tests.unit.local.stand_ins import write_stand_ins

MODES = ["shared_vllm", "lora_restart"]


@dataclass
class Comparing:
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "grpo_local.compare_command", "--directory", "compared"]
        return subprocess.Popen(
            [*command, *arguments],
            cwd=self.folder,
            env={**os.environ, **self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Exit status, stdout, stderr."""
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err

    @property
    def directory(self) -> Path:
        return self.folder / "compared"

    def record(self) -> Any:
        return json.loads((self.directory / "comparison.json").read_text())

    def row(self, title: str) -> list[str]:
        """The cells of one line of the table, without its title."""
        lines = (self.directory / "comparison.md").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith(f"| {title} |")]
        return [cell.strip() for cell in line.strip("|").split("|")[1:]]


@pytest.fixture
def comparing(tmp_path: Path) -> Comparing:
    write_stand_ins(tmp_path / "stand-ins")
    (tmp_path / "pids").mkdir()
    return Comparing(
        tmp_path,
        {"PYTHONPATH": str(tmp_path / "stand-ins"), "STAND_IN_PIDS": str(tmp_path / "pids")},
    )


def test_modes_are_run_one_after_another_and_measured(comparing: Comparing) -> None:
    status, out, err = comparing.run(
        *("--modes", "shared_vllm,lora_restart", "--steps", "20", "--seed", "5"),
        *("--", "--lr", "0.125"),
        STAND_IN_RESTARTS="2",
    )
    assert (status, err) == (0, "")
    assert "20 steps in each of shared_vllm, lora_restart" in out
    assert comparing.row("") == [f"`{mode}`" for mode in MODES]
    assert comparing.row("result") == ["ok"] * 2
    assert comparing.row("steps") == ["20"] * 2
    # rewards 1/20, 2/20, ... 1; a tenth of 20 steps is 2
    assert comparing.row("reward, first tenth of the steps") == ["0.075"] * 2
    assert comparing.row("reward, last tenth of the steps") == ["0.975"] * 2
    # 20 steps of 1.5 s, of which 0.05 s publish and 0.3 s wait
    assert comparing.row("all steps (s)") == ["30.0"] * 2
    assert comparing.row("all weight sync (s)") == ["1.0"] * 2
    assert comparing.row("wait for data per step, mean (s)") == ["0.30"] * 2
    assert comparing.row("publications") == ["20"] * 2
    assert comparing.row("engine restarts") == ["2"] * 2
    assert comparing.row("dropped requests") == ["0"] * 2
    # an interpreter with redis-py and a child of its own
    assert all(5 < float(cell) < 500 for cell in comparing.row("peak memory, server (MiB)"))
    for line in (comparing.directory / "comparison.md").read_text().splitlines():
        assert not line.startswith("|") or line in out
    for result in comparing.record()["results"]:
        facts = result["facts"]
        # the stand-in's server says that it sampled 5000 tokens
        speed = 5000 / facts["summary"]["training_s"]
        column = MODES.index(result["mode"])
        assert comparing.row("generated tokens per second")[column] == f"{speed:.0f}"

    assert_that_runs_differ_in_their_mode_alone(comparing)
    width_and_height = (comparing.directory / "comparison.png").read_bytes()[16:24]
    assert struct.unpack(">II", width_and_height) == (1800, 720)


def assert_that_runs_differ_in_their_mode_alone(comparing: Comparing) -> None:
    for mode in MODES:
        words = (comparing.directory / mode / "logs" / "trainer.log").read_text().split()
        assert words[words.index("--weight-bridge-mode") + 1] == mode
        assert words[words.index("--seed") + 1] == "5"
        assert words[words.index("--lr") + 1] == "0.125"
        log = (comparing.directory / "logs" / f"{mode}.log").read_text()
        assert f"run {mode}: 20 steps on arithmetic" in log


def test_a_mode_that_fails_or_drops_requests_is_told_and_the_others_still_run(
    comparing: Comparing,
) -> None:
    status, _, err = comparing.run(
        *("--steps", "3", "--modes", "lora_only,none"),
        STAND_IN_FAILING_MODE="lora_only",
        STAND_IN_DROPPED="2",
    )
    assert status == 1
    assert comparing.row("result") == ["failed", "ok"]
    assert comparing.row("steps") == ["-", "3"]
    assert comparing.row("dropped requests") == ["-", "2"]
    failed, dropped = err.splitlines()
    assert failed.startswith(
        "lora_only failed: failed (ProcessFailed): trainer ended with status 1"
    )
    assert dropped == "none: 2 dropped requests, must be 0"
    table = (comparing.directory / "comparison.md").read_text()
    assert f"- {failed}" in table
    assert f"- {dropped}" in table


def test_side_by_side_each_run_sees_its_own_gpu(comparing: Comparing) -> None:
    status, out, _ = comparing.run(
        *("--steps", "3", "--modes", "none,lora_only", "--side-by-side", "--gpu-ids", "2,5"),
    )
    assert status == 0
    assert "running none, lora_only" in out
    for mode, gpu in (("none", "2"), ("lora_only", "5")):
        log = (comparing.directory / mode / "logs" / "trainer.log").read_text()
        assert f"CUDA_VISIBLE_DEVICES={gpu}\n" in log
    assert "all at once" in (comparing.directory / "comparison.md").read_text()


def test_a_stop_signal_ends_every_run(comparing: Comparing) -> None:
    process = comparing.start("--steps", "3", STAND_IN_TRAINER_LINGERS_S="100")
    trainer = comparing.folder / "pids" / "trainer"
    metrics = comparing.directory / "shared_vllm" / "metrics.jsonl"
    assert eventually(lambda: metrics.exists() and trainer.exists())
    pids = [int(path.read_text()) for path in (comparing.folder / "pids").iterdir()]
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=180)
    assert process.returncode == 143
    assert err == "stopped by SIGTERM; every process of this comparison has ended\n"
    assert not any(is_alive(pid) for pid in pids)
    assert not (comparing.directory / "lora_only").exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--modes", "none,some"), "--modes.1: Input should be 'shared_vllm'"),
        (("--gpu-ids", "0"), "--gpu-ids is for --side-by-side"),
        (("--side-by-side", "--gpu-ids", "0,1"), "2 --gpu-ids for 4 --modes"),
        (("--", "--mode", "none"), "grpo-compare: --mode: the same for all, or set here"),
    ],
)
def test_mistakes_are_named_before_anything_starts(
    comparing: Comparing, arguments: tuple[str, ...], problem: str
) -> None:
    status, out, err = comparing.run(*arguments)
    assert (status, out) == (2, "")
    assert problem in err
    assert not comparing.directory.exists()


def test_a_used_directory_is_refused(comparing: Comparing) -> None:
    comparing.directory.mkdir()
    (comparing.directory / "comparison.md").write_text("precious")
    status, _, err = comparing.run()
    assert status == 1
    assert err.startswith("failed (RunDirectoryUnusable): compared holds files")
