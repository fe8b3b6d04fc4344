"""Hits an offline run, which samples in its own process. An undisturbed run that trains on the same
rollouts has the same weights."""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from grpo_core.process import ManagedProcess
from grpo_tiny_model.model import ensure_tiny_model
from tests.support.process_table import processes_with, stop_for
from tests.support.wait import wait_for
from tests.whole_run.chaos.hits import Hit, HitLog, Stopwatch, resources, say
from tests.whole_run.commands import SUMS

OFFLINE = "offline"
VARIABLE = "GRPO_CHAOS"
"""By which the processes of the runs are found."""
ITERATIONS = 40
KEYS = {
    "model.device": "cpu",
    "generation.backend": "local",
    "generation.max_new_tokens": 8,
    "eval.backend": "local",
    "eval.max_new_tokens": 8,
    "eval.interval": 10,
    "env_server.seq_len": 128,
    "grpo.seq_len": 128,
    "data.task": f"{SUMS}:Sums",
    "train.iterations": ITERATIONS,
    "train.lr": 1e-4,
}
EARLY_SHARE, STOP_SHARE = 0.3, 0.2
LONGEST_PAUSE_S, START_S = 3.0, 6.0
END_S = 600.0
WEIGHTS = "final_model/model.safetensors"


class OfflineRun:
    def __init__(self, dice: random.Random, log: HitLog) -> None:
        self._dice, self._log = dice, log
        self._place = log.directory / OFFLINE
        self._starts = 0

    def run(self, numbers: Iterable[int]) -> None:
        """Hit it once for each number. A run that ends before is followed by another one."""
        self._place.mkdir()
        directory = self._place / "run-0"
        process = self._start(directory)
        for number in numbers:
            while not self._survives(process, directory, number):
                self._require_equal_to_undisturbed(process, directory)
                directory = self._place / f"run-{number}"
                process = self._start(directory)
            process = self._start(directory)
        self._require_equal_to_undisturbed(process, directory)
        wait_for(lambda: processes_with(VARIABLE, str(self._place)), lambda left: not left)

    def _start(self, directory: Path) -> ManagedProcess:
        """Begin the run of this directory, or go on with it."""
        model = ensure_tiny_model()
        keys = KEYS | {"hydra.run.dir": directory, "model.train_id": model, "model.ref_id": model}
        if (directory / "keys.yaml").exists():
            keys["checkpoint.resume"] = directory
        words = [f"{name}={value}" for name, value in keys.items()]
        self._starts += 1
        log = self._place / f"{self._starts:03}.log"
        variables = {VARIABLE: str(self._place), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "grpo_runs.offline", *words]
        return ManagedProcess(OFFLINE, command, log, variables)

    def _survives(self, process: ManagedProcess, directory: Path, number: int) -> bool:
        """Hit it; False if it ended before."""
        dice, hit, watch = self._dice, Hit(number, OFFLINE, [OFFLINE], "SIGKILL"), Stopwatch()
        if dice.random() < EARLY_SHARE:
            time.sleep(dice.uniform(0.0, START_S))
        else:
            seen = _iterations(directory)
            wait_for(lambda: _iterations(directory) > seen or process.exit_code is not None)
            hit.recovered_s = watch.lap()
            time.sleep(dice.uniform(0.0, LONGEST_PAUSE_S))
        if dice.random() < STOP_SHARE:
            hit.signal = "SIGSTOP"
            stop_for(dice.uniform(0.5, LONGEST_PAUSE_S), processes_with(VARIABLE, str(self._place)))
        hit.resources = resources(processes_with(VARIABLE, str(self._place)), self._place)
        has_ended = process.exit_code is not None
        process.kill()
        hit.step = _iterations(directory)
        if not has_ended:
            self._log.add(hit)
        return not has_ended

    def _finish(self, process: ManagedProcess) -> None:
        assert process.wait(END_S) == 0, process.log_tail(40)
        process.kill()

    def _require_equal_to_undisturbed(self, process: ManagedProcess, directory: Path) -> None:
        self._finish(process)
        whole = self._place / f"{directory.name}-undisturbed"
        shutil.copytree(directory / "sampled", whole / "sampled")
        self._finish(self._start(whole))
        ours, theirs = ((at / WEIGHTS).read_bytes() for at in (directory, whole))
        assert ours == theirs, f"{directory} and {whole} ended with other weights"
        say(f"{directory.name}: the weights of an undisturbed run")


def _iterations(directory: Path) -> int:
    return len([*directory.glob("metrics/train_iter_*.json")])
