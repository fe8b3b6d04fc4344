"""Kills and stops the processes of real runs at random: `python -m tests.chaos --kills 1000`.

Each mode trains the tiny model with the settings that users get. A hit sends SIGKILL, or SIGSTOP
and later SIGCONT, to one process or two, and the killed ones are started again as Compose would.
After every hit the run must train another step. At the end of a mode: every group that run-api
acknowledged was trained exactly once or is still queued, steps are consecutive, the served weights
were the trained ones, and no process is left.

The seed decides victims, signals and pauses, not the moment within a step. `journal.jsonl` in the
directory has one line for each hit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from grpo_tiny_model.model import ensure_tiny_model
from tests.chaos.environment import ACKNOWLEDGED, SENT
from tests.chaos.environment import VARIABLE as SUBMISSIONS
from tests.faults.commands import (
    ENVIRONMENT,
    OTHER_MODES,
    REDIS,
    RUN_API,
    SERVER,
    SHARED,
    TRAINER,
)
from tests.faults.rig import (
    ENGINE,
    NOISE,
    SUPERVISOR,
    Rig,
    require_every_batch_trained_once,
    require_own_completions,
)
from tests.faults.stages import VARIABLE as STAGES
from tests.support.wait import wait_for

VICTIMS = (REDIS, RUN_API, ENGINE, SUPERVISOR, SERVER, TRAINER, ENVIRONMENT)
"""In the order in which several are killed: the supervisor knows its engine."""
STOPPED = (REDIS, RUN_API, SERVER, ENGINE, TRAINER, ENVIRONMENT)
LONGEST_STOP_S = 8.0
LONGEST_PAUSE_S = 3.0
TWO_SHARE, STOP_SHARE = 0.2, 0.3
DRAIN_S = 300.0
PER_STEP = ("batches", "rollouts")
"""Directories that get a file in each step."""


@dataclass
class Hit:
    """One hit and what followed.

    Attributes:
        ready_s: from the hit until every killed process was ready again, model load included
        recovered_s: from then until the next step was trained
        resources: of all processes together; `shm` and `disk` in bytes
    """

    number: int
    mode: str
    victims: list[str]
    signal: str
    ready_s: float = 0.0
    recovered_s: float = 0.0
    step: int = 0
    resources: dict[str, float] = field(default_factory=dict)


class Chaos:
    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._dice = random.Random(seed)
        self.hits: list[Hit] = []

    def run(self, mode: str, kills: int) -> None:
        place = self._directory / mode
        place.mkdir(parents=True)
        os.environ[SUBMISSIONS] = str(place / "submissions.txt")
        with tempfile.TemporaryDirectory(prefix="grpo-") as sockets:
            rig = Rig(place, Path(sockets), ensure_tiny_model(), mode, as_shipped=True)
            try:
                rig.start(REDIS, RUN_API, SERVER, TRAINER, ENVIRONMENT)
                rig.wait_for_steps(1)
                for number in range(kills):
                    self._hit(rig, place, number)
                self._drain(rig, place)
            finally:
                rig.close()
        wait_for(lambda: _processes_of(place), lambda left: not left)

    def _hit(self, rig: Rig, place: Path, number: int) -> None:
        dice = self._dice
        time.sleep(dice.uniform(0.0, LONGEST_PAUSE_S))
        stops = dice.random() < STOP_SHARE
        among = STOPPED if stops else VICTIMS
        victims = dice.sample(among, 2 if dice.random() < TWO_SHARE else 1)
        if SERVER in victims:  # it includes the other two
            victims = [name for name in victims if name not in (ENGINE, SUPERVISOR)]
        hit = Hit(number, rig.mode, victims, "SIGSTOP" if stops else "SIGKILL")
        began = time.monotonic()
        if stops:
            rig.stop_for(dice.uniform(0.5, LONGEST_STOP_S), *victims)
        else:
            for name in sorted(victims, key=VICTIMS.index):
                rig.kill(name)
            time.sleep(dice.uniform(0.0, 1.0))
            rig.start_what_is_dead()
        seen, ready = len(rig.records()), time.monotonic()
        rig.wait_for(lambda: len(rig.records()) > seen)
        hit.ready_s, hit.recovered_s = ready - began, time.monotonic() - ready
        hit.step, hit.resources = rig.records()[-1]["step"], _resources(place)
        self.hits.append(hit)
        with (self._directory / "journal.jsonl").open("a") as journal:
            journal.write(f"{json.dumps(asdict(hit))}\n")
        say(
            f"{rig.mode} {number + 1}: {hit.signal} {'+'.join(victims)}, ready after "
            f"{hit.ready_s:.1f} s, trained step {hit.step} {hit.recovered_s:.1f} s later"
        )

    def _drain(self, rig: Rig, place: Path) -> None:
        """End the environment in order. What it sent is then trained, or queued."""
        environment = rig.process(ENVIRONMENT)
        os.kill(environment.pid, signal.SIGTERM)
        assert environment.wait(DRAIN_S) == 0, environment.log_tail(40)
        words = [line.split() for line in (place / "submissions.txt").read_text().splitlines()]
        acknowledged = {name for word, name in words if word == ACKNOWLEDGED}
        unanswered = {name for word, name in words if word == SENT} - acknowledged

        def is_whole(counts: tuple[int, int, int]) -> bool:
            queued, waiting, uncertain = counts
            return waiting <= queued <= waiting + uncertain

        def counts() -> tuple[int, int, int]:
            """Queued groups, acknowledged groups that are not trained, and unanswered ones."""
            trained = {group for entry in rig.journal() for group in entry["groups"]}
            assert trained <= acknowledged | unanswered, "a group was trained that nobody sent"
            queued = rig.status()["queue_size"]
            return queued, len(acknowledged - trained), len(unanswered - trained)

        queued, *_ = wait_for(counts, is_whole, DRAIN_S)
        require_every_batch_trained_once(rig)
        taken = rig.journal()
        require_own_completions(taken, {entry["epoch"] for entry in taken})
        worst = max(record.get("alignment/probe_max", 0.0) for record in rig.records())
        assert worst < NOISE, f"the served weights were others than the trained: {worst}"
        say(
            f"{rig.mode}: {len(acknowledged)} groups acknowledged, {queued} queued, the others "
            f"trained once, in {taken[-1]['step']} steps; {len(unanswered)} submissions unanswered"
        )


def _processes_of(place: Path) -> list[psutil.Process]:
    """Those that inherited the run's variables."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(STAGES) == str(place / "stages"):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return [process for process in found if process.pid != os.getpid()]


def _resources(place: Path) -> dict[str, float]:
    found: Counter[str] = Counter()
    for process in _processes_of(place):
        try:
            found["processes"] += 1
            found["descriptors"] += process.num_fds()
            found["resident"] += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    for name, top in (("shm", Path("/dev/shm")), ("disk", place)):
        for directory, _, files in os.walk(top):
            found[name] += sum(_size(Path(directory, file)) for file in files)
    return {name: float(value) for name, value in found.items()}


def _size(path: Path) -> int:
    """In bytes; 0 if the run has removed it, or if it is kept for every step."""
    if path.suffix == ".log" or path.parent.name in PER_STEP:
        return 0
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def summary(hits: list[Hit]) -> list[str]:
    """Recovery by victim, and resources in the first and the last quarter of each mode."""
    lines = []
    for name in VICTIMS:
        of = [hit for hit in hits if name in hit.victims]
        if of:
            took = sorted(hit.recovered_s for hit in of)
            lines.append(
                f"{name}: {len(of)} hits, next step {statistics.median(took):.1f} s after all were "
                f"ready, at most {took[-1]:.1f} s"
            )
    for mode in dict.fromkeys(hit.mode for hit in hits):
        found = [hit.resources for hit in hits if hit.mode == mode]
        quarter = max(1, len(found) // 4)
        for name in sorted(found[0]):
            first, last = (
                statistics.median(each.get(name, 0.0) for each in part)
                for part in (found[:quarter], found[-quarter:])
            )
            lines.append(f"{mode}, {name}: {first:,.0f} at first, {last:,.0f} at last")
    return lines


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000, help="hits in all modes together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", default=",".join((SHARED, *OTHER_MODES)))
    parser.add_argument("--directory", type=Path, required=True, help="a new directory")
    given: Any = parser.parse_args(words)
    modes = given.modes.split(",")
    chaos = Chaos(given.directory, given.seed)
    for index, mode in enumerate(modes):
        chaos.run(mode, given.kills // len(modes) + (index < given.kills % len(modes)))
    for line in summary(chaos.hits):
        say(line)
    say(f"{len(chaos.hits)} hits with seed {given.seed}: nothing lost, nothing twice")


if __name__ == "__main__":
    main()
