"""Hits the processes of a run with run-api, Redis and inference servers."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import psutil

from grpo_tiny_model.model import ensure_tiny_model
from grpo_tiny_model.smollm2 import ensure_smollm2
from tests.support.wait import wait_for
from tests.whole_run.chaos.containers import ContainerRig
from tests.whole_run.chaos.hits import Hit, Journal, Stopwatch, resources, sample, say
from tests.whole_run.commands import (
    ENVIRONMENT,
    REDIS,
    RUN_API,
    SERVER,
    TRAINER,
    Shape,
    server_names,
)
from tests.whole_run.journalled_environment import ACKNOWLEDGED, SENT
from tests.whole_run.rig import (
    DEADLINE_S,
    ENGINE,
    NOISE,
    RANK,
    REWARD_WORKER,
    SUPERVISOR,
    Rig,
    require_every_batch_trained_once,
    require_own_completions,
    server_of,
)

STOP_SHARE = 0.3
LONGEST_STOP_S = 8.0
LONGEST_PAUSE_S = 3.0
LOOKS_EVERY_S = 60.0
FAST_DEADLINE_S = 1800.0
"""Of an undisturbed run, whose clock may be so fast that a minute is seconds."""


def _whole(name: str) -> str:
    """What includes this process: a server its engine, for example."""
    return {REWARD_WORKER: ENVIRONMENT, RANK: TRAINER}.get(name, server_of(name))


class AnyRig(Protocol):
    """A run whose processes, or containers, can be hit. See `Rig`."""

    def start(self, *names: str) -> None: ...
    def kill(self, *names: str) -> None: ...
    def stop_for(self, seconds: float, *names: str) -> None: ...
    def start_what_is_dead(self) -> None: ...
    def wait_until_ready(self, name: str) -> None: ...
    def wait_for(self, read: Callable[[], Any], accept: Callable[[Any], bool] = ...) -> Any: ...
    def end_environment(self, within_s: float) -> None: ...
    def records(self) -> list[dict[str, Any]]: ...
    def journal(self) -> list[dict[str, Any]]: ...
    def submissions(self) -> str: ...
    def status(self) -> dict[str, Any]: ...
    def processes(self) -> list[psutil.Process]: ...
    def close(self) -> None: ...


class QueueRun:
    """Args:
    name: of the shape, and of its directory below the journal's
    in_containers: by Compose, which restarts what is killed
    is_undisturbed: without hits; resources are read once a minute
    """

    def __init__(
        self,
        name: str,
        shape: Shape,
        dice: random.Random,
        journal: Journal,
        in_containers: bool = False,
        is_undisturbed: bool = False,
    ) -> None:
        self._name, self._shape, self._dice, self._journal = name, shape, dice, journal
        self._in_containers, self._is_undisturbed = in_containers, is_undisturbed
        self._deadline_s = FAST_DEADLINE_S if is_undisturbed else DEADLINE_S
        self._place = journal.directory / name
        self._servers = server_names(shape.servers)
        engines = [name.replace(SERVER, ENGINE) for name in self._servers]
        supervisors = [name.replace(SERVER, SUPERVISOR) for name in self._servers]
        others = [*self._servers, REDIS, RUN_API, TRAINER, ENVIRONMENT]
        if in_containers:
            self._victims, self._stopped = [*engines, *others], others
            return
        others += [REWARD_WORKER, *([RANK] if shape.ranks > 1 else [])]
        self._victims = [*engines, *supervisors, *others]
        """In the order in which several are killed: a supervisor knows its engine."""
        self._stopped = [*engines, *others]

    def run(self, numbers: Iterable[int]) -> None:
        """Hit it once for each number."""
        self._place.mkdir()
        with tempfile.TemporaryDirectory(prefix="grpo-") as sockets:
            rig = self._rig(Path(sockets))
            try:
                rig.start(REDIS, RUN_API, *self._servers, TRAINER, ENVIRONMENT)
                rig.wait_for(rig.records)
                hit = self._look if self._is_undisturbed else self._hit
                for number in numbers:
                    self._journal.add(hit(rig, number))
                self._drain(rig)
            finally:
                rig.close()
        if not self._in_containers:  # Compose is asked when they are removed
            wait_for(rig.processes, lambda left: not left, self._deadline_s)

    def _rig(self, sockets: Path) -> AnyRig:
        if self._in_containers:
            return ContainerRig(self._place, self._shape)
        model = ensure_smollm2() if self._shape.is_pretrained else ensure_tiny_model()
        return Rig(self._place, sockets, model, self._shape, self._deadline_s)

    def _look(self, rig: AnyRig, number: int) -> Hit:
        time.sleep(LOOKS_EVERY_S)
        return self._after(rig, Hit(number, self._name, [], "none"), Stopwatch())

    def _hit(self, rig: AnyRig, number: int) -> Hit:
        dice = self._dice
        time.sleep(dice.uniform(0.0, LONGEST_PAUSE_S))
        stops = dice.random() < STOP_SHARE
        victims = sample(dice, self._stopped if stops else self._victims)
        victims = [v for v in victims if _whole(v) == v or _whole(v) not in victims]
        hit = Hit(number, self._name, victims, "SIGSTOP" if stops else "SIGKILL")
        watch = Stopwatch()
        if stops:
            rig.stop_for(dice.uniform(0.5, LONGEST_STOP_S), *victims)
        else:
            rig.kill(*sorted(victims, key=self._victims.index))
            time.sleep(dice.uniform(0.0, 1.0))
            rig.start_what_is_dead()
            for server in {server_of(name) for name in victims} & {*self._servers}:
                rig.wait_until_ready(server)
        return self._after(rig, hit, watch)

    def _after(self, rig: AnyRig, hit: Hit, watch: Stopwatch) -> Hit:
        """Wait for the next step."""
        seen, hit.ready_s = len(rig.records()), watch.lap()
        rig.wait_for(lambda: len(rig.records()) > seen)
        hit.recovered_s = watch.lap()
        hit.step, hit.resources = rig.records()[-1]["step"], resources(rig.processes(), self._place)
        return hit

    def _drain(self, rig: AnyRig) -> None:
        """End the environment in order. What it sent is then trained, or queued."""
        if len(self._servers) > 1:  # those that came back serve what is trained
            rig.wait_for(lambda: rig.records()[-1].get("publication/servers") == len(self._servers))
        rig.end_environment(self._deadline_s)
        words = [line.split() for line in rig.submissions().splitlines()]
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

        queued, *_ = wait_for(counts, is_whole, self._deadline_s)
        require_every_batch_trained_once(rig.journal())
        taken = rig.journal()
        require_own_completions(taken, {entry["epoch"] for entry in taken})
        worst = max(record.get("alignment/probe_max", 0.0) for record in rig.records())
        assert worst < NOISE, f"the served weights were others than the trained: {worst}"
        say(
            f"{self._name}: {len(acknowledged)} groups acknowledged, {queued} queued, the others "
            f"trained once, in {taken[-1]['step']} steps; {len(unanswered)} submissions unanswered"
        )
