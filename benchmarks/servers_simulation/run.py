"""One simulated run: servers that follow a trainer, of which some are lost and come back."""

from __future__ import annotations

import asyncio
import random
import selectors
from dataclasses import dataclass, field
from statistics import fmean, median

from benchmarks.servers_simulation.network import Host, Network
from benchmarks.servers_simulation.stand_ins import (
    Log,
    Memory,
    Seat,
    Transport,
    World,
    manifest_of,
)
from grpo_core.weights import versions
from grpo_core.weights.versions import Announcement, VersionKind, sha256_of
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.supervisor.follower import Follower
from grpo_vllm.weights.fetch import Fetcher, Staged

EPOCH = 1
LOOK_EVERY_S = 0.1
SERVED = 0.99


@dataclass(frozen=True)
class Case:
    """`losses_per_hour`: mean number of times that one server is lost in an hour of a run."""

    servers: int
    with_peers: bool
    with_deltas: bool
    versions: int = 12
    every_s: float = 60.0
    full_bytes: int = 16 * 10**9
    delta_bytes: int = 480 * 10**6
    link_bytes_per_s: float = 1.25e9
    latency_s: float = 0.001
    losses_per_hour: float = 0.5
    start_s: float = 90.0
    pause_s: float = 2.0
    verify_bytes_per_s: float = 2e9
    apply_bytes_per_s: float = 2e9
    anchor_every: int = 20
    chunk_bytes: int = 250 * 10**6
    seed: int = 0


@dataclass
class Result:
    """`until_99_s`: per version, seconds from its announcement until 99 % of the servers that then
    exist serve it or a newer one. `staleness`: mean number of steps by
    which the serving servers were behind. `losses`: servers that were lost."""

    until_99_s: list[float] = field(default_factory=list)
    staleness: float = 0.0
    trainer_bytes: int = 0
    fetched_bytes: int = 0
    losses: int = 0
    seconds: float = 0.0

    @property
    def median_until_99_s(self) -> float:
        return median(self.until_99_s)


def simulate(case: Case) -> Result:
    before, versions.CHUNK_BYTES = versions.CHUNK_BYTES, case.chunk_bytes
    try:
        random.seed(case.seed)  # the fetcher's choices
        with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
            return runner.run(_Simulation(case).run())
    finally:
        versions.CHUNK_BYTES = before


class _NoSelector(selectors.DefaultSelector):
    """Nothing is read or written, so each wait is over at once. `now`: the time in seconds."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += max(0.0, timeout or 0.0)
        return []


class SimulatedTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _NoSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class _Simulation:
    def __init__(self, case: Case) -> None:
        self._case = case
        self._random = random.Random(case.seed)
        self._world = World(Network(case.link_bytes_per_s, case.latency_s))
        self._seats: list[Seat | None] = [None] * case.servers
        self._result = Result()
        self._stale: list[float] = []

    async def run(self) -> Result:
        case, result = self._case, self._result
        self._publish(0)
        self._world.network.free = True  # all begin with the same version
        servers = [asyncio.create_task(self._keep(number)) for number in range(case.servers)]
        await self._until_served(0)
        self._world.network.free = False
        watch = asyncio.create_task(self._watch())
        sent_before, began = self._world.trainer.sent, self._now()
        for step in range(1, case.versions + 1):
            self._publish(step)
            at = self._now()
            due = at + case.every_s
            result.until_99_s.append(await self._until_served(step))
            await asyncio.sleep(max(0.0, due - self._now()))
        result.seconds = self._now() - began
        result.trainer_bytes = self._world.trainer.sent - sent_before
        result.fetched_bytes = sum(host.received for host in self._world.hosts.values())
        result.staleness = fmean(self._stale)
        for task in [*servers, watch]:
            task.cancel()
        await asyncio.gather(*servers, watch, return_exceptions=True)
        return result

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _publish(self, step: int) -> None:
        case = self._case
        is_delta = case.with_deltas and step % case.anchor_every != 0
        manifest = manifest_of(
            f"{EPOCH}-{step}",
            case.full_bytes,
            case.delta_bytes if is_delta else None,
            case.chunk_bytes,
        )
        text = manifest.model_dump_json().encode()
        self._world.announce(
            Announcement(
                epoch=EPOCH,
                step=step,
                kind=VersionKind.DELTA if is_delta else VersionKind.FULL,
                parent=f"{EPOCH}-{step - 1}" if is_delta else "",
                digest=manifest.digest,
                manifest_sha256=sha256_of(text),
                bytes=manifest.delta_bytes if is_delta else manifest.full_bytes,
            ),
            text,
        )

    async def _until_served(self, step: int) -> float:
        """Returns seconds."""
        began, wanted = self._now(), PolicyVersion(EPOCH, step)
        while True:
            done = [s for s in self._seats if s and s.version and s.version >= wanted]
            alive = sum(seat is not None for seat in self._seats)
            if alive and len(done) >= SERVED * alive:
                return self._now() - began
            await asyncio.sleep(LOOK_EVERY_S)

    async def _watch(self) -> None:
        """Each second, by how many steps the serving servers are behind."""
        while True:
            head = self._world.announced[-1].step
            ages = [head - s.version.step for s in self._seats if s is not None and s.version]
            self._stale.append(sum(ages) / max(1, len(ages)))
            await asyncio.sleep(1.0)

    async def _keep(self, number: int) -> None:
        """One server's place: whenever the server is lost, another one starts."""
        life = 0
        while True:
            host = Host(f"server-{number}-{life}")
            self._world.hosts[host.name] = host
            lifetime_s = self._random.expovariate(max(1e-12, self._case.losses_per_hour / 3600))
            try:
                async with asyncio.timeout(lifetime_s):
                    await self._serve(number, host)
            except TimeoutError:
                host.alive = False
                self._seats[number] = None
                self._result.losses += 1
                self._world.forget(f"http://{host.name}")
            life += 1

    async def _serve(self, number: int, host: Host) -> None:
        case, world = self._case, self._world
        log = Log(world, host.name, case.with_peers)
        own_url = f"http://{host.name}" if case.with_peers else ""
        transport = Transport(world, host, case.verify_bytes_per_s)
        fetcher = Fetcher(log, transport, Memory(case.apply_bytes_per_s), own_url)  # type: ignore[arg-type]
        seat = Seat(case.pause_s)
        follower = Follower(log, fetcher, seat, _accepts)  # type: ignore[arg-type]
        joined = await follower.join(waits=True)
        await asyncio.sleep(case.start_s)
        seat.version = joined.version if joined else PolicyVersion(EPOCH, 0)
        self._seats[number] = seat
        await follower.follow()


async def _accepts(_staged: Staged) -> None:
    pass
