"""A run on several servers: keeps every version of its weights, and recomputes every completion
with the weights of the version that it names."""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from grpo_core.rollouts.files import read_steps
from grpo_core.rollouts.record import RolloutRecord
from grpo_runs.process.ports import free_port
from tests.e2e.demo_run import DEADLINE_S
from tests.support.pages import ROOT
from tests.support.wait import wait_for

_VERSION = re.compile(r"\d+-\d+")
_ARCHIVE_EVERY_S = 0.02


@dataclass
class RunningDemo:
    """`directory`: of the run; `archive`: every version's directory, by its id."""

    directory: Path
    archive: Path
    process: subprocess.Popen[str]
    exit_status: int = 0
    """That is expected at the end."""

    @property
    def records(self) -> list[dict[str, float]]:
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def steps(self) -> int:
        return len(self.records)

    def wait_for_step(self, step: int) -> None:
        wait_for(lambda: self.steps >= step or self.process.poll() is not None, bool, DEADLINE_S)
        assert self.steps >= step, self.output()

    def longest_step_s(self, after: int) -> float:
        """Of the steps after this one."""
        return max(record["train/step_time"] for record in self.records[after:])

    def output(self) -> str:
        return (self.directory.parent / "output").read_text()

    def stop(self) -> None:
        """As Ctrl-C does: the trainer finishes its step."""
        self.process.send_signal(signal.SIGINT)
        self.exit_status = 128 + signal.SIGINT

    def lost_groups(self) -> Counter[str]:
        """By reason; without those whose scores are all equal."""
        lost: Counter[str] = Counter()
        log = (self.directory / "logs" / "environment.log").read_text()
        for failures in re.findall(r"failures=(\{.*?\})", log):
            lost.update(ast.literal_eval(failures))
        del lost["equal_scores"]
        return lost

    def server(self, name: str) -> psutil.Process:
        """The supervisor of a server."""
        return next(
            each
            for each in psutil.Process(self.process.pid).children()
            if each.status() != psutil.STATUS_ZOMBIE and f"--server-name {name}" in _words(each)
        )

    def start_another(
        self,
        name: str,
        log: Path,
        *flags: str,
        module: Sequence[str] = ("-m", "grpo_vllm"),
        **options: object,
    ) -> subprocess.Popen[bytes]:
        """A server that the run does not know, on ports of its own, like "server-0". Options of
        that one are replaced, flags are added."""
        like = self.server("server-0")
        command = like.cmdline()
        own = {"server_name": name, "port": free_port(), "health_port": free_port()}
        for option, value in (own | options).items():
            command[command.index(f"--{option.replace('_', '-')}") + 1] = str(value)
        at = command.index("-m")
        command[at : at + 2] = module
        with log.open("wb") as output:
            return subprocess.Popen(
                [*command, *flags],
                cwd=like.cwd(),
                env=like.environ(),
                stdout=output,
                stderr=output,
            )

    def kill_server(self, name: str) -> None:
        """With all its processes, as if its host was lost."""
        send(self.server(name), signal.SIGKILL)


def send(process: psutil.Process, number: int) -> None:
    """To it and all its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(number)


@contextlib.contextmanager
def running_demo(directory: Path, *flags: str) -> Iterator[RunningDemo]:
    """The end of the block waits for the end of the run."""
    command = [sys.executable, "-m", "grpo_runs", "--run-dir", str(directory), *flags]
    archive, stop = directory.parent / "archive", threading.Event()
    archive.mkdir(parents=True)
    with (directory.parent / "output").open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, text=True
        )
    served = directory / "checkpoints" / "served_weights"
    keeper = threading.Thread(target=_keep, args=(served, archive, stop))
    keeper.start()
    try:
        run = RunningDemo(directory, archive, process)
        yield run
        assert process.wait(DEADLINE_S) == run.exit_status, run.output()
    finally:
        process.terminate()
        process.wait()
        stop.set()
        keeper.join()


def _words(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def _keep(served: Path, archive: Path, stop: threading.Event) -> None:
    """Link each version's files before the trainer deletes them."""
    while not stop.wait(_ARCHIVE_EVERY_S):
        found = served.iterdir() if served.exists() else iter(())
        for version in found:
            target = archive / version.name
            if not _VERSION.fullmatch(version.name) or target.exists():
                continue
            part = archive / f"{version.name}.part"
            part.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                for file in version.iterdir():
                    os.link(file, part / file.name)
                part.rename(target)


@dataclass
class Recomputed:
    """`differences`: of each completion that one version sampled, the largest |recomputed - logged
    logprob|; `others`: the same with the weights of the version before; `versions`: completions by
    version; `mixed`: completions during which the weights changed."""

    differences: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    versions: Counter[tuple[int, int]] = field(default_factory=Counter)
    mixed: int = 0


def recomputed(run: RunningDemo, model: Path, is_adapter: bool, one_in: int = 1) -> Recomputed:
    """Every completion of the run that was trained on, or every n-th one."""
    found = Recomputed()
    by_version: dict[tuple[int, int], list[RolloutRecord]] = {}
    for record in itertools.islice(read_steps(run.directory / "rollouts"), 0, None, one_in):
        assert record.versions is not None
        first, last = ((epoch, step) for epoch, step in record.versions)
        if first != last:
            found.mixed += 1
            continue
        by_version.setdefault(first, []).append(record)
    previous = None
    for version, records in sorted(by_version.items()):
        policy = _policy(run, model, version, is_adapter)
        for record in records:
            found.versions[version] += 1
            found.differences.append(_difference(policy, record))
            if previous is not None:
                found.others.append(_difference(previous, record))
        previous = policy
    return found


def _policy(run: RunningDemo, model: Path, version: tuple[int, int], is_adapter: bool) -> Any:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    directory = run.archive / f"{version[0]}-{version[1]}"
    if not directory.exists():  # version [1, 0] is the model itself
        assert version[1] == 0, f"{directory} was not kept"
    whole = directory if directory.exists() and not is_adapter else model
    policy = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    if is_adapter and directory.exists():
        policy = PeftModel.from_pretrained(policy, directory)
    return policy.eval()


def _difference(policy: Any, record: RolloutRecord) -> float:
    import torch

    tokens = torch.tensor([record.tokens])
    with torch.no_grad():
        logprobs = policy(tokens).logits[0, :-1].float().log_softmax(-1)
    mine = logprobs.gather(1, tokens[0, 1:, None])[:, 0][torch.tensor(record.mask[1:]) == 1]
    return float((mine - torch.tensor(record.behaviour_logprobs)).abs().max())
