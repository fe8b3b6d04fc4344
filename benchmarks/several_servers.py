"""Runs on one to three inference servers: `python -m benchmarks.several_servers`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import psutil
from pydantic import Field

from benchmarks.run_api_bench import machine
from benchmarks.run_api_bench.report import table
from benchmarks.run_api_bench.results_file import replace_section
from benchmarks.train_bench.turns import Reading, in_turn, spread, values
from grpo_core.logs import configure_logging
from grpo_core.settings import Command, CommandSettings, load_settings
from grpo_runs.report.summary import counted
from grpo_tiny_model.smollm2 import ensure_smollm2

SECTION = "several servers"
WARM_STEPS = 2
_LOOK_EVERY_S = 0.2
SMOLLM2_FLAGS = (
    *("--dtype", "bfloat16", "--task", "examples/two_digit_sums.py:TwoDigitSums"),
    *("--batch-size", "16", "--gradient-accumulation-steps", "1", "--max-completion-tokens", "12"),
)


class SeveralServersSettings(CommandSettings):
    """Measure runs on one to three servers, in turns."""

    command: ClassVar[Command] = Command(prog="bench-servers", env_prefix="BENCH_SERVERS_")

    rounds: int = Field(3, ge=1, description="Times that each kind of run is measured")
    steps: int = Field(12, ge=4, description="Steps of one run")
    most: int = Field(3, ge=1, description="Largest number of servers")
    smollm2: bool = Field(False, description="Train SmolLM2-135M instead of the tiny model")
    pin: bool = Field(False, description="Bind each server to a core of its own")
    results: Path | None = Field(None, description="Markdown file whose section is replaced")


@dataclass(frozen=True)
class Kind:
    """How weights are published. `several`: whether more than one server can be used."""

    name: str
    flags: tuple[str, ...]
    several: bool = True


KINDS = (
    Kind("shared_vllm", ("--mode", "shared_vllm"), several=False),
    Kind("none", ("--mode", "none")),
    Kind(
        "none, restart",
        ("--mode", "none", "--publish", "restart", "--vllm-restart-interval", "1"),
        several=False,
    ),
    Kind("lora_only", ("--mode", "lora_only")),
)
COLUMNS = {
    "a step, s": ("step_s", 1.0),
    "wait for a batch, s": ("wait_s", 1.0),
    "publication, s": ("publish_s", 1.0),
    "first serves, s": ("first_s", 1.0),
    "all serve, s": ("all_s", 1.0),
    "pause, s": ("pause_s", 1.0),
    "announced, MB": ("bytes", 1e6),
}


def main() -> None:
    settings = load_settings(SeveralServersSettings, sys.argv[1:])
    configure_logging("bench-servers")
    flags = [*("--model", str(ensure_smollm2())), *SMOLLM2_FLAGS] if settings.smollm2 else []
    sides = {
        (kind, count): _measure([*kind.flags, *flags], count, settings.steps, settings.pin)
        for kind in KINDS
        for count in (range(1, settings.most + 1) if kind.several else (1,))
    }
    found = in_turn(
        SECTION, settings.rounds, {f"{kind.name} {n}": each for (kind, n), each in sides.items()}
    )
    rows = [
        [
            kind.name,
            str(count),
            *(_cell(found[f"{kind.name} {count}"], key, scale) for key, scale in COLUMNS.values()),
        ]
        for kind, count in sides
    ]
    lines = [
        _about(settings),
        "",
        *(f"- {fact}" for fact in machine.host()),
        "",
        *table([["mode", "servers", *COLUMNS], *rows]),
    ]
    sys.stdout.write("\n".join([*lines, ""]))
    if settings.results:
        model = "SmolLM2-135M" if settings.smollm2 else "tiny model"
        replace_section(settings.results, f"{SECTION}: {model}", lines)


def _pin(run: psutil.Process) -> None:
    """Bind all threads of server i to core i."""
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        for process in run.children():
            words = " ".join(process.cmdline())
            if "-m grpo_vllm " not in words:
                continue
            name = re.search(r"--server-name server-(\d+)", words)  # one alone has none
            core = cores[int(name[1]) % len(cores) if name else 0]
            for each in [process, *process.children(recursive=True)]:
                for thread in each.threads():
                    os.sched_setaffinity(thread.id, {core})


def _measure(flags: Sequence[str], servers: int, steps: int, pins: bool) -> Any:
    def measured() -> Reading:
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch) / "run"
            command = [sys.executable, "-m", "grpo_runs", "--run-dir", str(directory)]
            command += ["--servers", str(servers), "--steps", str(steps), "--eval-every", "0"]
            run = subprocess.Popen([*command, *flags], stdout=subprocess.DEVNULL)
            while run.poll() is None:
                if pins:
                    _pin(psutil.Process(run.pid))
                time.sleep(_LOOK_EVERY_S)
            assert run.returncode == 0, f"{command} ended with status {run.returncode}"
            lines = (directory / "metrics.jsonl").read_text().splitlines()
            records = [json.loads(line) for line in lines][WARM_STEPS:]
            summary = json.loads((directory / "summary.json").read_text())
        return _reading(records, summary["servers"])

    return measured


def _reading(records: Sequence[dict[str, Any]], servers: Sequence[dict[str, Any]]) -> Reading:
    """Medians over the steps; of the pauses, the longest of all servers' last ones."""
    keys = {
        "step_s": "train/step_time",
        "wait_s": "train/data_fetch_time",
        "publish_s": "train/sync_time",
        "first_s": "publication/first_serves_time",
        "all_s": "publication/all_serve_time",
        "bytes": "publication/bytes",
    }
    reading: Reading = {}
    for name, key in keys.items():
        if found := [record[key] for record in records if key in record]:
            reading[name] = median(found)
    if reading.get("bytes"):
        reading["pause_s"] = max(server["pause_s"] for server in servers)
    return reading


def _cell(readings: Sequence[Reading], key: str, scale: float) -> str:
    if not all(key in reading for reading in readings):
        return "-"
    found = values(readings, key, scale)
    return spread(found) if len(found) > 1 else f"{found[0]:.3g}"


def _about(settings: SeveralServersSettings) -> str:
    today = datetime.now(UTC).date().isoformat()
    model = "SmolLM2-135M in bfloat16" if settings.smollm2 else "the tiny model in float32"
    task = "sums of two-digit numbers" if settings.smollm2 else "`grpo-run`'s arithmetic task"
    over_runs = ", over the runs: median (lowest to highest)" if settings.rounds > 1 else ""
    cores = (
        "Each server is bound to a core of its own, and the trainer uses all of them"
        if settings.pin
        else "All servers and the trainer share the cores"
    )
    return (
        f"`python -m benchmarks.several_servers` on {today}, {counted(settings.rounds, 'run')} of "
        f"{settings.steps} steps of {model}, on {task}. Medians over the steps{over_runs}. *First* "
        "and *all serve* count from the announcement; a publication includes writing the files and "
        f"the check of the served weights. {cores}, so the table shows what the protocol costs, "
        "not what servers on hosts of their own gain."
    )


if __name__ == "__main__":
    main()
