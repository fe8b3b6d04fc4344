"""Runs the demo once, and loads its results."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from grpo_core.evaluation.results import EvalResult, read_results
from grpo_core.weights.servers import ServerStatus
from grpo_runs.modes import Mode
from grpo_runs.run_directory import RunDirectory
from tests.support.pages import ROOT, command
from tests.support.threads import one_thread
from tests.support.wait import wait_for

DEADLINE_S = 1800
NOISE = 1e-4
"""Largest difference between logprobs of the same float32 weights in two programs."""


@dataclass(frozen=True)
class DemoRun:
    """`output`, `errors`: what the command wrote."""

    directory: Path
    output: str
    errors: str

    @property
    def records(self) -> list[dict[str, float]]:
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def evaluations(self) -> list[EvalResult]:
        """With all their items, by step."""
        return read_results(self.directory / "eval.jsonl")


@dataclass(frozen=True)
class ModeRun(DemoRun):
    mode: Mode
    steps: int

    @property
    def server(self) -> ServerStatus:
        """Of a run with one."""
        summary: Any = json.loads((self.directory / "summary.json").read_text())
        (server,) = summary["servers"]
        return ServerStatus.model_validate(server)

    @property
    def final(self) -> Path:
        return self.directory / "checkpoints" / self.mode.final_directory


def run_demo(
    directory: Path,
    *flags: str,
    option: str = "--run-dir",
    environment: Mapping[str, str] | None = None,
) -> DemoRun:
    """Run it to its end, which must be a success and leave no process.

    Args:
        option: `--resume` if the directory is that of an earlier run
        environment: more variables
    """
    done = run_local(option, str(directory), *flags, environment=environment)
    logs = [f"{path}\n{path.read_text()[-5000:]}" for path in directory.glob("logs/*.log")]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    assert _processes_that_log_below(directory / "logs") == []
    return DemoRun(directory, done.stdout, done.stderr)


def _processes_that_log_below(logs: Path) -> list[int]:
    """Ids of processes whose standard output is a file below `logs`, as is the case in a run."""
    pids = (process.pid for process in psutil.process_iter())
    return [pid for pid in pids if logs.resolve() in _standard_output(pid).parents]


def _standard_output(pid: int) -> Path:
    try:
        return Path(f"/proc/{pid}/fd/1").readlink()
    except OSError:  # it has ended, or belongs to another user
        return Path("/")


def run_local(
    *words: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of grpo_runs in the repository's root to its end."""
    return subprocess.run(
        [sys.executable, "-m", "grpo_runs", *words],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def signalled_after(
    steps: int,
    run: RunDirectory,
    number: signal.Signals,
    *flags: str,
    look: Callable[[], object] = lambda: None,
) -> None:
    """Start the demo, look at it once a checkpoint has so many steps, and send it a signal. Its
    services end with it."""
    command = [sys.executable, "-m", "grpo_runs", "--run-dir", str(run.path), *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as demo:
        wait_for(lambda: (run.newest_checkpoint_step() or 0) >= steps, deadline_s=DEADLINE_S)
        look()
        demo.send_signal(number)
    assert demo.returncode == (-number if number == signal.SIGKILL else 128 + number)


def readme_flags() -> list[str]:
    """Options of grpo-demo for the command in README.md's section "Your own reward"."""
    return demo_flags(command("README.md", "make demo TASK=examples/"))


def demo_flags(words: Sequence[str]) -> list[str]:
    """Options of grpo-demo for a command `make demo ...`."""
    make, demo, *options = words
    assert (make, demo) == ("make", "demo")
    flags: list[str] = []
    for option in options:
        name, value = option.split("=", 1)
        flags += shlex.split(value) if name == "DEMO_FLAGS" else [f"--{name.lower()}", value]
    return flags


def load_model(directory: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def accuracy_of(model: Any, tokenizer: Path) -> float:
    """Mean probability of the correct answer over all sums: the expected reward, without sampling
    noise."""
    from transformers import AutoTokenizer

    from grpo_tiny_model.model import expected_accuracy, sum_examples

    with one_thread():
        return expected_accuracy(model, *sum_examples(AutoTokenizer.from_pretrained(tokenizer)))
