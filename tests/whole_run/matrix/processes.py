"""Faults of the processes of a whole run, of their disks, their memory and their clocks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

from tests.whole_run.commands import REDIS, SHARED, TRAINER
from tests.whole_run.matrix import host
from tests.whole_run.matrix.declared import Fault, Kind, Site, passing
from tests.whole_run.matrix.network import RESET
from tests.whole_run.matrix.whole_run import (
    CLOCKS,
    LINKS,
    PROCESSES,
    STATES,
    WAITED_S,
    Outcome,
    WholeRun,
)
from tests.whole_run.table import STANDS_STILL

STOP_S = 45.0
"""Longer than a trainer's pause lease, run-api's wait for Redis, and a silent connection."""
HOUR_S = 3600
DISKS = {REDIS: "redis", STATES: "checkpoints", ".": "logs and metrics"}


def faults() -> Iterator[Fault]:
    for name in STANDS_STILL:
        injected = f"SIGSTOP of its processes, SIGCONT {STOP_S:g} s later"
        inject = partial(stands_still, name=name)
        yield Fault(Kind.PROCESS, f"{name} stands still", injected, inject, mode=SHARED)
    for link in LINKS[:5]:
        name = f"{' to '.join(link)}: the name is not resolved"
        injected = "taken out of `/etc/hosts` for 10 s; all open connections are reset"
        yield passing(Kind.NETWORK, name, injected, 10.0, partial(nameless, link=link))
    for what, disk in DISKS.items():
        full = "a file fills it for 10 s (ext4 on a loop device; tmpfs)"
        during = partial(full_disk, what=what)
        yield passing(Kind.DISK, f"the disk of {disk} is full", full, 10.0, during)
    name = "the disk of checkpoints is read-only"
    read_only = "an error of its file system: the kernel remounts it read-only"
    yield Fault(Kind.DISK, name, read_only, read_only_disk, mode=SHARED)
    slow = "a blkio cgroup with 20 kB/s on a loop device with ext4, for 15 s"
    yield passing(Kind.DISK, "the disk of redis is slow", slow, 15.0, slow_disk)
    injected = "a memory cgroup: the kernel kills it"
    yield Fault(Kind.MEMORY, "trainer needs more memory", injected, out_of_memory, mode=SHARED)
    for name in PROCESSES:
        for seconds, way in ((HOUR_S, "forward"), (-HOUR_S, "back")):
            inject = partial(clock_jumps, name=name, seconds=seconds)
            title = f"{name}: the clock jumps {way} by an hour"
            yield Fault(Kind.CLOCK, title, "a preloaded library", inject, mode=CLOCKS)


def stands_still(site: Site, name: str) -> Outcome:
    run = site.run(SHARED)
    run.stop_for(STOP_S, name)
    return run.goes_on()


@contextmanager
def nameless(run: WholeRun, link: tuple[str, str]) -> Iterator[None]:
    with run.without_name(link), run.links[link].open_ones(*RESET):
        yield


def full_disk(run: WholeRun, what: str) -> AbstractContextManager[None]:
    run.has_full_log = what == "."
    return host.filled(run.place / what)


def slow_disk(run: WholeRun) -> AbstractContextManager[None]:
    return host.throttled(run.process(REDIS).pid, run.place / "redis", bytes_per_s=20_000)


def read_only_disk(site: Site) -> Outcome:
    """For good: the trainer must end."""
    run, began = site.run(SHARED), time.monotonic()
    host.report_error(run.place / STATES)
    run.process(TRAINER).wait(WAITED_S)
    seconds, error = time.monotonic() - began, run.error_of(TRAINER)
    logged = run.events()
    site.end_run()
    return Outcome(f"{TRAINER} ends with `{error}`", logged, seconds)


def out_of_memory(site: Site) -> Outcome:
    run = site.run(SHARED)
    process, began = run.process(TRAINER), time.monotonic()
    with host.starved(process.pid):
        process.wait(WAITED_S)
    ended_s = time.monotonic() - began
    outcome = run.goes_on()
    return replace(outcome, seconds=ended_s + outcome.seconds)


def clock_jumps(site: Site, name: str, seconds: int) -> Outcome:
    run = site.run(CLOCKS)
    run.set_clock(name, seconds)
    outcome = run.goes_on()
    run.set_clock(name, 0)
    run.goes_on()
    return outcome
