"""Faults of each link of a whole run: network, and damaged bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from tests.support.wait import wait_for
from tests.whole_run.commands import (
    ENVIRONMENT,
    LORA_ONLY,
    REDIS,
    RUN_API,
    SERVER,
    SHARED,
    TRAINER,
)
from tests.whole_run.matrix.declared import LIMIT_S, Fault, Kind, Site, passing
from tests.whole_run.matrix.network import DROP, RESET, Link
from tests.whole_run.matrix.relay import Damage
from tests.whole_run.matrix.whole_run import LINKS, WAITED_S, Outcome, WholeRun

LOSS = ("-m", "statistic", "--mode", "random", "--probability", "0.2")
OF_FILES = ((TRAINER, REDIS), (SERVER, REDIS))
"""Links that carry more in the modes in which weights travel as files."""


def _garbage(data: bytes) -> bytes:
    return os.urandom(len(data))


PASSING: dict[str, tuple[str, float, Callable[[Link], AbstractContextManager[object]]]] = {
    "partition": (
        "`iptables` drops all packets for 20 s",
        20.0,
        lambda link: link.all_packets(*DROP),
    ),
    "reset": (
        "`iptables` resets all open connections",
        1.0,
        lambda link: link.open_ones(*RESET),
    ),
    "loss": (
        "`iptables` drops every fifth packet for 10 s",
        10.0,
        lambda link: link.all_packets(*LOSS, *DROP),
    ),
    "delay": (
        "a relay delays each way by 200 ms for 10 s",
        10.0,
        lambda link: link.through(Damage(delay_s=0.2)),
    ),
    "slow reader": (
        "a relay reads 20 kB/s for 10 s",
        10.0,
        lambda link: link.through(Damage(bytes_per_s=20_000)),
    ),
    **{
        f"garbled {what}s": (
            f"a relay replaces all bytes of {what}s by random ones for 5 s",
            5.0,
            lambda link, what=what: link.through(Damage(**{what: _garbage})),
        )
        for what in ("answer", "request")
    },
}
HALF_OPEN = "`iptables` drops all packets of the connections that are open, for ever; new ones work"


STAYS = {(TRAINER, RUN_API): 60.0, (ENVIRONMENT, RUN_API): 240.0}
"""The deadline that users get, in seconds."""


def faults() -> Iterator[Fault]:
    for link, deadline_s in STAYS.items():
        inject = partial(staying, link=link, deadline_s=deadline_s)
        injected = f"`iptables` drops all packets; the deadline is {deadline_s:g} s"
        name = f"{' to '.join(link)}: a partition that stays"
        limit_s = deadline_s + LIMIT_S
        yield Fault(Kind.NETWORK, name, injected, inject, mode=SHARED, limit_s=limit_s)
    for mode, links in ((SHARED, LINKS), (LORA_ONLY, OF_FILES)):
        for link in links:
            if mode == SHARED and link == (TRAINER, REDIS):
                continue  # the trainer has no Redis there
            where = f"{' to '.join(link)}{'' if mode == SHARED else f', `{mode}`'}"
            inject = partial(half_open, mode=mode, link=link)
            yield Fault(Kind.NETWORK, f"{where}: half-open", HALF_OPEN, inject, mode=mode)
            for name, (injected, seconds, damaged) in PASSING.items():
                kind = Kind.BYTES if name.startswith("garbled") else Kind.NETWORK
                during = partial(_on_link, link=link, damaged=damaged)
                yield passing(kind, f"{where}: {name}", injected, seconds, during, mode)


def _on_link(
    run: WholeRun,
    link: tuple[str, str],
    damaged: Callable[[Link], AbstractContextManager[object]],
) -> AbstractContextManager[object]:
    return damaged(run.links[link])


def staying(site: Site, link: tuple[str, str], deadline_s: float) -> Outcome:
    """The client ends; started again, it goes on."""
    run, began = site.run(SHARED), time.monotonic()
    with run.links[link].all_packets(*DROP):
        run.process(link[0]).wait(deadline_s + WAITED_S)
        seconds = time.monotonic() - began
    return replace(run.goes_on(), seconds=seconds)


def half_open(site: Site, mode: str, link: tuple[str, str]) -> Outcome:
    run = site.run(mode)
    wire, began = run.links[link], time.monotonic()
    dead = set(wire.connections())
    with wire.open_ones(*DROP) as number:
        wait_for(lambda: dead & set(wire.connections()), lambda left: not left, WAITED_S)
        seconds = time.monotonic() - began
        outcome = run.goes_on()
    happened = f"closed connections: {number}; {outcome.happened}"
    return replace(outcome, happened=happened, seconds=seconds)
