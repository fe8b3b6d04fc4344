"""What the followers of a simulation use instead of Redis, HTTP, /dev/shm and vLLM.

Each class has the methods that `grpo_vllm.supervisor.follower` and `grpo_vllm.weights.fetch` call.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.servers_simulation.network import Host, HostLost, Network
from grpo_core.weights.ref import WeightRef
from grpo_core.weights.version_log import BLOCK_MS, SLOT_S, SLOTS, Slot
from grpo_core.weights.versions import (
    MANIFEST,
    Announcement,
    FileParts,
    Manifest,
    sha256_of,
    version_id,
)
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.weights.transport import SourceFailed


class AnyDigest(str):
    """Equal to every digest, because nothing is computed."""

    __slots__ = ()

    def __eq__(self, _other: object) -> bool:
        return True

    def __ne__(self, _other: object) -> bool:
        return False

    __hash__ = str.__hash__


class Piece(bytes):
    """Stands for bytes that are not there. `size`: how many."""

    size: int

    @classmethod
    def of(cls, count: int) -> Piece:
        piece = cls()
        piece.size = count
        return piece

    def __len__(self) -> int:
        return self.size


@dataclass
class World:
    """What is shared: the log, the network and the files."""

    network: Network
    announced: list[Announcement] = field(default_factory=list)
    manifests: dict[str, bytes] = field(default_factory=dict)
    trainer: Host = field(default_factory=lambda: Host("trainer"))
    hosts: dict[str, Host] = field(default_factory=dict)
    peers: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    slots: dict[tuple[str, int], tuple[str, float]] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def announce(self, version: Announcement, manifest: bytes) -> None:
        self.manifests[version.id] = manifest
        self.announced.append(version)
        self.news.set()
        self.news = asyncio.Event()

    def forget(self, peer: str, *versions: str) -> None:
        """As a source of these versions; by default, of all."""
        for version in versions or [*self.peers]:
            self.peers[version] = [url for url in self.peers[version] if url != peer]

    def host_of(self, url: str) -> Host:
        return self.trainer if url == self.trainer.name else self.hosts[url]


class Log:
    """Stands for `ServerVersionLog`; its commands take no time, as each takes under a millisecond.
    Args: name: the server's, which is also its URL"""

    def __init__(self, world: World, name: str, with_peers: bool) -> None:
        self._world = world
        self._name = name
        self._with_peers = with_peers

    async def head(self) -> Announcement | None:
        return self._world.announced[-1] if self._world.announced else None

    async def next(self, after: PolicyVersion) -> Announcement | None:
        head = await self.head()
        if head is not None and head.version > after:
            return head
        try:
            async with asyncio.timeout(BLOCK_MS / 1000):
                await self._world.news.wait()
        except TimeoutError:
            return None
        return await self.head()

    async def between(self, after: PolicyVersion, last: PolicyVersion) -> list[Announcement]:
        return [each for each in self._world.announced if after < each.version <= last]

    async def sources(self, _version: PolicyVersion) -> list[str]:
        return ["http://trainer"]

    async def peers(self, version: PolicyVersion, at_most: int) -> list[str]:
        if not self._with_peers:
            return []
        peers = self._world.peers[version_id(version)]
        return random.sample(peers, min(at_most, len(peers)))

    async def add_source(self, version: PolicyVersion, url: str) -> None:
        self._world.peers[version_id(version)].append(url)

    async def remove_source(self, version: PolicyVersion, url: str) -> None:
        self._world.forget(url, version_id(version))

    async def take_slot(self, sources: Sequence[str]) -> Slot | None:
        return self._hold((source, number) for source in sources for number in range(SLOTS))

    async def renew_slot(self, slot: Slot) -> bool:
        return self._hold([slot]) is not None

    async def release_slot(self, slot: Slot) -> None:
        if self._world.slots.get(slot, ("", 0.0))[0] == self._name:
            del self._world.slots[slot]

    def _hold(self, wanted: Iterable[tuple[str, int]]) -> Slot | None:
        """The first of them that is free. Most of the simulation's time is spent here."""
        now, slots = asyncio.get_running_loop().time(), self._world.slots
        for slot in wanted:
            held = slots.get(slot)
            if held is None or held[1] <= now or held[0] == self._name:
                slots[slot] = self._name, now + SLOT_S
                return Slot(*slot)
        return None


@dataclass
class Transport:
    """Stands for `HttpTransport`. Args: verify_bytes_per_s: of the digests"""

    world: World
    host: Host
    verify_bytes_per_s: float

    async def read(self, url: str, first: int = 0, size: int | None = None) -> bytes:
        source, version, name = url.removeprefix("http://").split("/")
        del first
        if name == MANIFEST:
            text = self.world.manifests[version]
            await self._from(source, len(text))
            return text
        assert size is not None
        await self._from(source, size)
        if not self.world.network.free:
            await asyncio.sleep(size / self.verify_bytes_per_s)
        return Piece.of(size)

    async def _from(self, source: str, count: int) -> None:
        host = self.world.host_of(source)
        if not host.alive:
            raise SourceFailed(f"{source} is gone")
        try:
            await self.world.network.transfer(host, self.host, count)
        except HostLost as error:
            raise SourceFailed(str(error)) from error


@dataclass
class Memory:
    """Stands for `Staging`. Args: apply_bytes_per_s: of a delta, by the size of its result"""

    apply_bytes_per_s: float

    @staticmethod
    def digest(_piece: bytes) -> str:
        return AnyDigest()

    async def in_place(self, _source: str, _wanted: Announcement) -> Path | None:
        return None

    async def open(self, version: str) -> None:
        pass

    async def write(self, version: str, name: str, first: int, piece: bytes) -> None:
        pass

    async def fold(
        self, _version: str, _name: str, _parent: Path, deltas: Sequence[str], wanted: FileParts
    ) -> None:
        await asyncio.sleep(len(deltas) * wanted.bytes / self.apply_bytes_per_s)

    async def finish(self, version: str, _manifest: bytes) -> Path:
        return Path("/staging") / version

    async def discard(self, version: str) -> None:
        pass


@dataclass
class Seat:
    """Stands for the engine. `version`: the served one, None before the first engine answers."""

    pause_s: float
    version: PolicyVersion | None = None

    async def rename(self, version: PolicyVersion) -> None:
        self.version = version

    async def commit(self, weights: WeightRef, restarts: bool) -> float:
        assert not restarts
        await asyncio.sleep(self.pause_s)
        self.version = weights.version
        return self.pause_s

    def in_use(self) -> frozenset[str]:
        return frozenset()


def manifest_of(
    version: str, full_bytes: int, delta_bytes: int | None, chunk_bytes: int
) -> Manifest:
    """One file, and its delta unless that is None."""
    name, digest = "model.safetensors", sha256_of(version.encode())

    def parts(count: int) -> FileParts:
        return FileParts(bytes=count, chunks=(digest,) * -(-count // chunk_bytes))

    deltas = {} if delta_bytes is None else {name: parts(delta_bytes)}
    return Manifest(files={name: parts(full_bytes)}, deltas=deltas)
