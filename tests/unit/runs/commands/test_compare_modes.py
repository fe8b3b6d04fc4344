"""`grpo-compare` with a small program that replaces the runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grpo_core.settings import load_settings
from grpo_core.weights.servers import ServerState, ServerStatus
from grpo_runs.commands.compare_modes import compare_modes
from grpo_runs.process.stack import MIB
from grpo_runs.report.summary import BenchmarkFacts, RunFacts, summarise
from grpo_runs.settings.compare import CompareSettings
from tests.unit.runs.records import BENCHMARK, metrics_line, record
from tests.unit.runs.stand_ins import Shown, write_programs

STEPS = 20
RUN = """
from stand_in_common import *

def note(event):
    with open(here / "events", "a") as file:
        file.write(f"{event} {mode}\\n")

here, run = pathlib.Path(os.environ["STAND_IN"]), pathlib.Path(option("--run-dir"))
mode = option("--mode")
told = os.environ.get("STAND_IN_DOES", "").split(",")
does = [word.removeprefix(f"{mode}:") for word in told]
print(*sys.argv[1:], flush=True)
note("begins")
run.mkdir()
(run / "metrics.jsonl").write_text((here / "metrics.jsonl").read_text())
if "fails" in does:
    sys.exit("failed (ProcessFailed): trainer ended with status 1")
facts = json.loads((here / "facts.json").read_text()) | {"mode": mode}
if "drops" in does:
    facts["servers"][0]["dropped_requests"] = 2
(run / "summary.json").write_text(json.dumps(facts))
note("ends")
"""


def facts() -> RunFacts:
    """Facts of 20 steps of 1.5 s each, with 0.05 s to publish and 0.3 s of waiting."""
    records = [record(step, **{"reward/mean": step / STEPS}) for step in range(1, STEPS + 1)]
    return RunFacts(
        mode="none",
        seed=5,
        summary=summarise(records, total_s=60.0, training_s=40.0),
        benchmark=BenchmarkFacts(publishes=20, **BENCHMARK),
        servers=(
            ServerStatus(
                name="one",
                state=ServerState.SERVING,
                epoch=1,
                step=1,
                restarts=2,
                crashes=1,
                generation_tokens=5000,
            ),
        ),
        peak_bytes={"vllm-server": 100 * MIB},
    )


@dataclass
class Comparing:
    folder: Path
    shown: Shown

    def run(self, *arguments: str) -> int:
        """The exit status."""
        words = " ".join(arguments).split()
        given = ["--directory", str(self.directory), "--steps", str(STEPS), *words]
        return compare_modes(load_settings(CompareSettings, given), self.shown)

    @property
    def directory(self) -> Path:
        return self.folder / "compared"

    @property
    def table(self) -> str:
        return (self.directory / "comparison.md").read_text()

    @property
    def events(self) -> list[str]:
        return (self.folder / "events").read_text().splitlines()

    def said(self, mode: str) -> str:
        return (self.directory / "logs" / f"{mode}.log").read_text()

    def row(self, title: str) -> list[str]:
        """The cells of one line of the table, without its title."""
        (line,) = [line for line in self.table.splitlines() if line.startswith(f"| {title} |")]
        return [cell.strip() for cell in line.strip("|").split("|")[1:]]


@pytest.fixture
def comparing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Comparing:
    write_programs(tmp_path / "stand-in", grpo_runs=RUN)
    (tmp_path / "facts.json").write_text(facts().model_dump_json())
    (tmp_path / "metrics.jsonl").write_text(metrics_line(1) + metrics_line(2))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stand-in"))
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    return Comparing(tmp_path, Shown())


def test_modes_run_one_after_another_and_differ_in_their_mode_alone(comparing: Comparing) -> None:
    assert comparing.run("--modes none,lora_only --seed 5 --lr 0.125") == 0
    assert comparing.shown.err == ""
    assert comparing.events == ["begins none", "ends none", "begins lora_only", "ends lora_only"]
    for mode in ("none", "lora_only"):
        run = comparing.directory / mode
        expected = f"--lr 0.125 --mode {mode} --steps 20 --seed 5 --run-dir {run}"
        assert comparing.said(mode).startswith(expected)


@pytest.mark.parametrize("words", ["--vllm-restart-interval 7", "--vllm_restart_interval=7"])
def test_lora_only_publishes_each_step_while_other_modes_restart_less_often(
    comparing: Comparing, words: str
) -> None:
    assert comparing.run(f"--modes lora_restart,lora_only -- {words} --lr 0.125") == 0
    assert comparing.said("lora_restart").startswith(f"{words} --lr 0.125 --mode")
    assert comparing.said("lora_only").startswith("--lr 0.125 --mode")


def test_the_table_has_a_column_per_mode_with_what_it_took(comparing: Comparing) -> None:
    assert comparing.run("--modes none,lora_only") == 0
    expected = {
        "": ["`none`", "`lora_only`"],
        "result": ["ok"] * 2,
        # rewards 1/20, 2/20, ... 1; a tenth of 20 steps is 2
        "reward, first tenth of the steps": ["0.075"] * 2,
        "reward, last tenth of the steps": ["0.975"] * 2,
        "all weight sync (s)": ["1.0"] * 2,
        "generated tokens per second": ["125"] * 2,
        "engine crashes": ["1"] * 2,
        "dropped requests": ["0"] * 2,
        "a publication, mean (s)": ["0.25"] * 2,
        "peak memory, server (MiB)": ["100"] * 2,
        "peak GPU memory, trainer (MiB)": ["-"] * 2,
        "mean resident memory, trainer (MiB)": ["40"] * 2,
        "checkpoint on disk (MiB)": ["12.0"] * 2,
        "trained adapter on disk (MiB)": ["0.5"] * 2,
    }
    assert {title: comparing.row(title) for title in expected} == expected
    recorded: Any = json.loads((comparing.directory / "comparison.json").read_text())
    assert recorded["results"][1]["facts"]["servers"][0]["generation_tokens"] == 5000
    assert (comparing.directory / "comparison.png").stat().st_size > 5_000


def test_a_mode_that_fails_or_drops_requests_is_told_and_the_others_still_run(
    comparing: Comparing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_DOES", "none:fails,lora_restart:drops")
    assert comparing.run("--modes none,lora_restart,lora_only") == 1
    assert comparing.row("result") == ["failed", "ok", "ok"]
    assert comparing.row("dropped requests") == ["-", "2", "0"]
    failed, dropped = comparing.shown.err.splitlines()
    expected = "none failed: failed (ProcessFailed): trainer ended with status 1; see "
    assert failed.startswith(expected)
    assert dropped == "lora_restart: the server dropped 2 requests, not 0"
