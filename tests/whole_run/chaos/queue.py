"""Hits the processes of a run with run-api, Redis and inference servers."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import replace

from grpo_tiny_model.model import ensure_tiny_model
from grpo_tiny_model.smollm2 import ensure_smollm2
from tests.support.wait import wait_for
from tests.whole_run.chaos.containers import ContainerRig
from tests.whole_run.chaos.hits import Hit, HitLog, Stopwatch, resources, say
from tests.whole_run.commands import (
    ENVIRONMENT,
    NODE,
    REDIS,
    REWARD_WORKER,
    RUN_API,
    Commands,
    Shape,
    server_names,
    trainer_names,
)
from tests.whole_run.journal import Outcome
from tests.whole_run.rig import DEADLINE_S, Rig, server_of
from tests.whole_run.table import victims
from tests.whole_run.verdict import judge

UNDISTURBED = "undisturbed"
"""A shape without hits, for a run of many hours, which libfaketime shortens to minutes. Resources
are read once a minute."""
STOP_SHARE = 0.3
TWO_SHARE = 0.2
LONGEST_STOP_S = 8.0
LONGEST_PAUSE_S = 3.0
LOOKS_EVERY_S = 60.0
FAST_DEADLINE_S = 1800.0
"""Of an undisturbed run, whose clock may be so fast that a minute is seconds."""


def _whole(name: str) -> str:
    """What includes this process: a server its engine, for example."""
    return {REWARD_WORKER: ENVIRONMENT}.get(name, server_of(name))


class QueueRun:
    """Args: name: of the shape, and of its directory below the log's"""

    def __init__(self, name: str, shape: Shape, dice: random.Random, log: HitLog) -> None:
        self._name, self._shape, self._dice, self._log = name, shape, dice, log
        self._is_undisturbed = name == UNDISTURBED
        self._deadline_s = FAST_DEADLINE_S if self._is_undisturbed else DEADLINE_S
        self._place = log.directory / name
        self._servers = server_names(shape.servers)
        self._victims = victims(shape)

    def run(self, numbers: Iterable[int]) -> None:
        """Hit it once for each number."""
        self._place.mkdir()
        with self._rig() as rig:
            trainers = trainer_names(self._shape.nodes)
            rig.start(REDIS, RUN_API, *self._servers, *trainers, ENVIRONMENT)
            rig.wait_for(rig.records)
            hit = self._look if self._is_undisturbed else self._hit
            for number in numbers:
                self._log.add(hit(rig, number))
            self._drain(rig)
        if not self._shape.in_containers:  # Compose is asked when they are removed
            wait_for(rig.processes, lambda left: not left, self._deadline_s)

    def _rig(self) -> Rig:
        if self._shape.in_containers:
            return ContainerRig(self._place, self._shape)
        model = ensure_smollm2() if self._shape.is_pretrained else ensure_tiny_model()
        return Rig(Commands(self._place, model, self._shape), self._deadline_s)

    def _look(self, rig: Rig, number: int) -> Hit:
        time.sleep(LOOKS_EVERY_S)
        return self._after(rig, Hit(number, self._name, [], "none"), Stopwatch())

    def _hit(self, rig: Rig, number: int) -> Hit:
        dice = self._dice
        time.sleep(dice.uniform(0.0, LONGEST_PAUSE_S))
        stops = dice.random() < STOP_SHARE
        found = dice.sample(self._victims, 2 if dice.random() < TWO_SHARE else 1)
        found = [v for v in found if _whole(v) == v or _whole(v) not in found]
        found = [v for v in found if v.startswith(NODE)][:1] or found
        hit, watch = Hit(number, self._name, found, "SIGSTOP" if stops else "SIGKILL"), Stopwatch()
        if stops:
            rig.stop_for(dice.uniform(0.5, LONGEST_STOP_S), *found)
        else:
            rig.kill(*sorted(found, key=self._victims.index))
            time.sleep(dice.uniform(0.0, 1.0))
            rig.start_what_is_dead()
            for server in {server_of(name) for name in found} & {*self._servers}:
                rig.wait_until_ready(server)
        return self._after(rig, hit, watch)

    def _after(self, rig: Rig, hit: Hit, watch: Stopwatch) -> Hit:
        """Wait for the next step."""
        seen, hit.ready_s = len(rig.records()), watch.lap()
        rig.wait_for(lambda: len(rig.records()) > seen)
        hit.recovered_s = watch.lap()
        hit.step, hit.resources = rig.records()[-1]["step"], resources(rig.processes(), self._place)
        return hit

    def _drain(self, rig: Rig) -> None:
        """End the environment in order. What it sent is then trained, or queued."""
        if len(self._servers) > 1:  # those that came back serve what is trained
            rig.wait_for(lambda: rig.records()[-1].get("publication/servers") == len(self._servers))
        rig.end(ENVIRONMENT)

        def problems_of_queue() -> list[str]:
            evidence = rig.evidence(queued=rig.status()["queue_size"])
            assert not (lasting := judge(replace(evidence, queued=None))), lasting
            return judge(evidence)

        # The trainer may be between two batches: what it has taken is no longer queued.
        wait_for(problems_of_queue, lambda found: not found, self._deadline_s)
        evidence = rig.evidence()
        steps = max(evidence.line())
        acknowledged, unanswered = map(evidence.digests, (Outcome.ACKNOWLEDGED, Outcome.UNANSWERED))
        queued = len(acknowledged - {*evidence.trained()})
        say(
            f"{self._name}: {len(acknowledged)} groups acknowledged, {queued} queued, the others "
            f"trained once, in {steps} steps; {len(unanswered)} submissions unanswered"
        )
