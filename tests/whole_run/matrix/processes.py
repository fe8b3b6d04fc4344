"""Faults of the processes of a whole run, of their disks, their memory and their clocks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from tests.whole_run.commands import ENVIRONMENT, REDIS, RUN_API, SERVER, SHARED, TRAINER
from tests.whole_run.matrix import host
from tests.whole_run.matrix.declared import Fault, Kind, Outcome, Site
from tests.whole_run.matrix.network import RESET
from tests.whole_run.matrix.whole_run import CLOCKS, LINKS, STATES, WAITED_S
from tests.whole_run.rig import ENGINE

STOP_S = 45.0
"""Longer than a trainer's pause lease, run-api's wait for Redis, and a silent connection."""
HOUR_S = 3600
DISKS = {REDIS: "redis", STATES: "checkpoints", ".": "logs and metrics"}


def faults() -> Iterator[Fault]:
    for name in (REDIS, RUN_API, SERVER, ENGINE, TRAINER, ENVIRONMENT):
        injected = f"SIGSTOP of its processes, SIGCONT {STOP_S:g} s later"
        inject = partial(stopped, name=name)
        yield Fault(Kind.PROCESS, f"{name} stands still", injected, inject, mode=SHARED)
    for link in LINKS[:5]:
        name = f"{' to '.join(link)}: the name is not resolved"
        injected = "taken out of `/etc/hosts` for 10 s; all open connections are reset"
        yield Fault(Kind.NETWORK, name, injected, partial(nameless, link=link), mode=SHARED)
    yield from _of_disks()
    injected = "a memory cgroup: the kernel kills it"
    yield Fault(Kind.MEMORY, "trainer needs more memory", injected, out_of_memory, mode=SHARED)
    for name in (REDIS, RUN_API, SERVER, TRAINER, ENVIRONMENT):
        for seconds in (HOUR_S, -HOUR_S):
            way = "forward" if seconds > 0 else "back"
            inject = partial(clock_jumps, name=name, seconds=seconds)
            title = f"{name}: the clock jumps {way} by an hour"
            yield Fault(Kind.CLOCK, title, "a preloaded library", inject, mode=CLOCKS)


def _of_disks() -> Iterator[Fault]:
    for what in (REDIS, STATES, "."):
        title = f"the disk of {DISKS[what]}"
        full = "a file fills it for 10 s (ext4 on a loop device; tmpfs)"
        inject = partial(full_disk, what=what)
        yield Fault(Kind.DISK, f"{title} is full", full, inject, mode=SHARED)
    read_only = "an error of its file system: the kernel remounts it read-only"
    yield Fault(
        Kind.DISK, "the disk of checkpoints is read-only", read_only, read_only_disk, mode=SHARED
    )
    slow = "a blkio cgroup with 20 kB/s on a loop device with ext4, for 15 s"
    yield Fault(Kind.DISK, "the disk of redis is slow", slow, slow_disk, mode=SHARED)


def stopped(site: Site, name: str) -> Outcome:
    run = site.run(SHARED)
    run.note_logs()
    run.rig.stop_for(STOP_S, name)
    return Outcome(*run.goes_on())


def nameless(site: Site, link: tuple[str, str]) -> Outcome:
    run = site.run(SHARED)
    run.note_logs()
    with run.without_name(link), run.links[link].open_ones(*RESET):
        time.sleep(10.0)
    return Outcome(*run.goes_on())


def full_disk(site: Site, what: str) -> Outcome:
    run = site.run(SHARED)
    run.note_logs()
    run.has_full_log = what == "."
    with host.filled(run.place / what):
        time.sleep(10.0)
    result = run.goes_on()
    run.has_full_log = False
    return Outcome(*result)


def read_only_disk(site: Site) -> Outcome:
    """For good: the trainer must end."""
    run, began = site.run(SHARED), time.monotonic()
    run.note_logs()
    host.report_error(run.place / STATES)
    run.rig.process(TRAINER).wait(WAITED_S)
    seconds, error = time.monotonic() - began, run.error_of(TRAINER)
    logged = run.events()
    site.end_run()
    return Outcome(f"{TRAINER} ends with `{error}`", logged, seconds)


def slow_disk(site: Site) -> Outcome:
    run = site.run(SHARED)
    run.note_logs()
    with host.throttled(run.rig.process(REDIS).pid, run.place / "redis", bytes_per_s=20_000):
        time.sleep(15.0)
    return Outcome(*run.goes_on())


def out_of_memory(site: Site) -> Outcome:
    run = site.run(SHARED)
    run.note_logs()
    process, began = run.rig.process(TRAINER), time.monotonic()
    with host.starved(process.pid):
        process.wait(WAITED_S)
    ended_s = time.monotonic() - began
    happened, error, seconds = run.goes_on()
    return Outcome(happened, error, ended_s + seconds)


def clock_jumps(site: Site, name: str, seconds: int) -> Outcome:
    run = site.run(CLOCKS)
    run.note_logs()
    run.set_clock(name, seconds)
    happened, error, took = run.goes_on()
    run.set_clock(name, 0)
    run.goes_on()
    return Outcome(happened, error, took)
