"""Stand-ins in memory for what followers use: the version log, the network, copies, an engine.

Times pass on the event loop's clock alone, which is virtual in these tests.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo_core.weights.ref import UNTRAINED, WeightRef
from grpo_core.weights.servers import ServerStatus
from grpo_core.weights.version_log import SLOT_S, SLOTS, Slot
from grpo_core.weights.versions import (
    DELTA_SUFFIX,
    MANIFEST,
    NO_PARENT,
    Announcement,
    FileParts,
    Manifest,
    VersionKind,
    WrongDigest,
    sha256_of,
    version_of,
)
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.supervisor.commits import CommitRefused
from grpo_vllm.supervisor.follower import Check, Follower
from grpo_vllm.weights.fetch import Fetcher, SourceFailed, Staged
from grpo_vllm.weights.staging import StagingFull

TRAINER, WEIGHTS = "http://trainer/weights", "model.safetensors"


@dataclass
class Log:
    """`ServerVersionLog` of one server; `shared` is what all servers of the run see. The newest
    version is only read while `answers` is set."""

    shared: Shared
    name: str = "a"
    answers: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.answers.set()

    async def head(self) -> Announcement | None:
        await self.answers.wait()
        return self.shared.announced[-1] if self.shared.announced else None

    async def next(self, after: PolicyVersion) -> Announcement | None:
        await self.answers.wait()
        try:
            async with asyncio.timeout(1.0):
                while not (head := await self.head()) or head.version <= after:
                    await self.shared.changed.wait()
                return head
        except TimeoutError:
            return None

    async def group(self) -> str:
        return ""

    async def others(self) -> list[ServerStatus]:
        return self.shared.others

    async def between(self, after: PolicyVersion, last: PolicyVersion) -> list[Announcement]:
        return [each for each in self.shared.announced if after < each.version <= last]

    async def sources(self, version: PolicyVersion) -> list[str]:
        return sorted(self.shared.sources[version])

    async def peers(self, version: PolicyVersion, at_most: int) -> list[str]:
        peers = sorted(self.shared.peers[version])
        return random.sample(peers, min(at_most, len(peers)))

    async def add_source(self, version: PolicyVersion, url: str) -> None:
        self.shared.peers[version].add(url)

    async def remove_source(self, version: PolicyVersion, url: str) -> None:
        self.shared.peers[version].discard(url)

    async def take_slot(self, sources: Sequence[str]) -> Slot | None:
        for slot in (Slot(source, number) for source in sources for number in range(SLOTS)):
            if await self.renew_slot(slot):
                return slot
        return None

    async def renew_slot(self, slot: Slot) -> bool:
        now = asyncio.get_running_loop().time()
        holder, until = self.shared.slots.get(slot, ("", 0.0))
        if holder != self.name and until > now:
            return False
        self.shared.slots[slot] = (self.name, now + SLOT_S)
        return True

    async def release_slot(self, slot: Slot) -> None:
        if self.shared.slots.get(slot, ("",))[0] == self.name:
            del self.shared.slots[slot]


@dataclass
class Shared:
    """The run: what is announced, and `files` by URL. A URL in `silent` never answers, and others
    after `delay_s`."""

    announced: list[Announcement] = field(default_factory=list)
    sources: defaultdict[PolicyVersion, set[str]] = field(default_factory=lambda: defaultdict(set))
    peers: defaultdict[PolicyVersion, set[str]] = field(default_factory=lambda: defaultdict(set))
    slots: dict[Slot, tuple[str, float]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    delay_s: float = 0.0
    asked: list[str] = field(default_factory=list)
    others: list[ServerStatus] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def announce(
        self,
        version: PolicyVersion,
        content: bytes = b"",
        parent: Announcement | None = None,
        delta: bytes | None = None,
        kind: VersionKind = VersionKind.FULL,
        restarts: bool = False,
        model: str = "",
    ) -> Announcement:
        """Put the files at the trainer, and announce them. `delta`: here, simply the result."""
        content = content or f"weights of {version}".encode()
        deltas = {} if delta is None else {WEIGHTS: parts_of(delta)}
        manifest = Manifest(files={WEIGHTS: parts_of(content)}, deltas=deltas)
        text = manifest.model_dump_json().encode()
        announced = Announcement(
            **version.fields(),
            kind=VersionKind.DELTA if parent else kind,
            parent=parent.id if parent else NO_PARENT,
            digest="" if kind is VersionKind.BASE else manifest.digest,
            manifest_sha256=sha256_of(text),
            restarts=restarts,
            model=model,
        )
        self.put(TRAINER, announced, {MANIFEST: text, WEIGHTS: content})
        if delta is not None:
            self.put(TRAINER, announced, {WEIGHTS + DELTA_SUFFIX: delta})
        self.sources[version].add(TRAINER)
        self.append(announced)
        return announced

    def append(self, announced: Announcement) -> None:
        self.announced.append(announced)
        self.changed.set()
        self.changed = asyncio.Event()

    def put(self, source: str, announced: Announcement, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            self.files[f"{source}/{announced.id}/{name}"] = content

    async def read(self, url: str, first: int = 0, size: int | None = None) -> bytes:
        """As `HttpTransport.read`."""
        self.asked.append(url)
        if any(url.startswith(each) for each in self.silent):
            await asyncio.Event().wait()
        await asyncio.sleep(self.delay_s)
        if url not in self.files:
            raise SourceFailed(f"GET {url}: status 404")
        content = self.files[url][first:]
        return content if size is None else content[:size]


def parts_of(content: bytes) -> FileParts:
    return FileParts(bytes=len(content), chunks=(sha256_of(content),) if content else ())


@dataclass
class Copies:
    """`Staging` without files. `room`: bytes that it takes, or None."""

    room: int | None = None
    held: dict[str, dict[str, bytes]] = field(default_factory=dict)
    discarded: list[str] = field(default_factory=list)

    async def in_place(self, _source: str, _wanted: Announcement) -> Path | None:
        return None

    async def arrived(self, _wanted: Announcement) -> Path | None:
        return None

    async def open(self, version: str) -> None:
        self.held[version] = {}

    async def write(self, version: str, name: str, first: int, piece: bytes) -> None:
        total = sum(len(content) for files in self.held.values() for content in files.values())
        if self.room is not None and total + len(piece) > self.room:
            raise StagingFull("/dev/shm has no room; start the server with --staging-dir")
        content = self.held[version].get(name, b"")
        self.held[version][name] = content[:first] + piece

    async def fold(
        self, version: str, name: str, parent: Path, deltas: Sequence[str], wanted: FileParts
    ) -> None:
        assert parent.name in self.held, "the parent's files are there"
        result = self.held[version][deltas[-1]]
        if parts_of(result) != wanted:
            raise WrongDigest("the result has another digest")
        self.held[version][name] = result

    async def finish(self, version: str, manifest: bytes) -> Path:
        self.held[version][MANIFEST] = manifest
        return Path("/staging") / version

    async def discard(self, version: str) -> None:
        self.held.pop(version, None)
        self.discarded.append(version)


@dataclass
class Engine:
    """A `CommitQueue` that records what it serves. `refuses`: ids; `commit_s`: of each commit."""

    served: list[WeightRef] = field(default_factory=list)
    renamed: list[PolicyVersion] = field(default_factory=list)
    restarted: list[bool] = field(default_factory=list)
    refuses: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    commit_s: float = 0.0
    version: PolicyVersion = UNTRAINED

    async def rename(self, version: PolicyVersion) -> None:
        self.renamed.append(version)
        self.version = version

    async def commit(self, weights: WeightRef, restarts: bool) -> float:
        await asyncio.sleep(self.commit_s)
        if weights.path is not None and weights.path.name in self.refuses:
            raise CommitRefused("the engine does not like it")
        self.served.append(weights)
        self.version = weights.version
        self.restarted.append(restarts)
        return self.commit_s

    def in_use(self) -> frozenset[str]:
        return frozenset(self.used)


async def allowed(_staged: Staged) -> None:
    """A check that accepts everything."""


@dataclass
class Server:
    """One follower of the run with everything that it uses."""

    shared: Shared
    name: str = "a"
    max_staleness: int | None = None
    check: Check = allowed
    reports: list[tuple[str, str, int]] = field(default_factory=list)
    """(`fetching`, `refused`, requests to sources before the report)"""
    copies: Copies = field(default_factory=Copies)
    engine: Engine = field(default_factory=Engine)

    def __post_init__(self) -> None:
        self.url = f"http://{self.name}/weights"
        log = self.log = Log(self.shared, self.name)
        self.fetcher = Fetcher(log, self.shared, self.copies, self.url)  # type: ignore[arg-type]
        self.follower = Follower(
            log,
            self.fetcher,
            self.engine,
            self.check,
            self.max_staleness,  # type: ignore[arg-type]
            self.report,
        )

    async def report(self) -> None:
        now = self.follower.progress
        self.reports.append((now.fetching, now.refused, len(self.shared.asked)))

    @property
    def served(self) -> list[str]:
        return [weights.path.name if weights.path else "base" for weights in self.engine.served]

    async def joins(self) -> WeightRef | None:
        """Join, and offer the copies to other servers."""
        found = await self.follower.join(waits=True)
        self.publish()
        if found is not None:
            self.engine.version = found.version
        return found

    def publish(self) -> None:
        """Let the others read this server's copies."""
        for version, files in self.copies.held.items():
            announced = next(a for a in self.shared.announced if a.version == version_of(version))
            self.shared.put(self.url, announced, files)
