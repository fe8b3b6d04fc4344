"""Brings an announced version to this host: files in place, what the engine's workers received, by
HTTP ranges, or as deltas.

A chunk is used only if it has the announced digest, so any source will do: the trainer, while one
of its slots is free, or another server of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import structlog
from pydantic import SecretStr

from grpo_core.closing import ClosesOnAsyncExit
from grpo_core.errors import GrpoError
from grpo_core.security import plain
from grpo_core.weights.delta import BadDelta
from grpo_core.weights.version_log import ServerVersionLog, Slot
from grpo_core.weights.versions import (
    DELTA_SUFFIX,
    MANIFEST,
    Announcement,
    FileParts,
    Manifest,
    VersionKind,
    WrongDigest,
    sha256_of,
)
from grpo_vllm.weights.staging import PARTIAL, NotFetched, Staging, checked_manifest

log = structlog.get_logger()

FETCH_DEADLINE_S = 600.0
CHUNK_DEADLINE_S = 30.0
ASK_AGAIN_S = (0.1, 0.3)
"""Bounds of a random pause while all slots are taken."""
PEERS_ASKED = 3
"""Servers whose slots are tried in one round."""
HTTP = ("http://", "https://")


class SourceFailed(GrpoError):
    """A source did not send what was asked of it."""


class FetchOverdue(NotFetched):
    """A version was not fetched within the deadline."""


class HttpTransport(ClosesOnAsyncExit):
    """Ranges of files by HTTP, never through a proxy: the trainer and the servers of a run name the
    addresses, and no user chose a proxy for them. Args: api_key: sent as a bearer token"""

    def __init__(self, api_key: SecretStr | None) -> None:
        key = plain(api_key)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(headers=headers, timeout=CHUNK_DEADLINE_S, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def read(self, url: str, first: int = 0, size: int | None = None) -> bytes:
        """`size` bytes from byte `first` on, or the whole file. Raises `SourceFailed`."""
        span = {} if size is None else {"Range": f"bytes={first}-{first + size - 1}"}
        try:
            answer = await self._http.get(url, headers=span)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise SourceFailed(f"GET {url}: {str(error) or type(error).__name__}") from error
        if answer.status_code != (200 if size is None else 206):
            raise SourceFailed(f"GET {url}: status {answer.status_code}")
        return answer.content


@dataclass(frozen=True)
class Staged:
    """A complete, verified version on this host. `directory`: None for the kind `base`; `in_place`:
    it is the trainer's own directory. `bytes` were fetched, of them `peer_bytes` from other
    servers."""

    announced: Announcement
    directory: Path | None
    in_place: bool = False
    seconds: float = 0.0
    bytes: int = 0
    peer_bytes: int = 0


@dataclass
class _Transfer:
    """The fetch of one version. `left`: sources with a wrong digest."""

    wanted: Announcement
    bytes: int = 0
    peer_bytes: int = 0
    left: set[str] = field(default_factory=set)
    failures: dict[str, str] = field(default_factory=dict)


class Fetcher:
    """Args:
    versions: has the sources and their slots
    transport: reads from other hosts
    staging: keeps the copies
    own_url: URL below which this server offers its copies; "" if it does not
    """

    def __init__(
        self,
        versions: ServerVersionLog,
        transport: HttpTransport,
        staging: Staging,
        own_url: str = "",
    ) -> None:
        self._versions = versions
        self._transport = transport
        self._staging = staging
        self._own_url = own_url
        self._left: defaultdict[str, set[str]] = defaultdict(set)
        self._without_deltas: set[str] = set()
        """Ids of versions whose deltas were of no use."""
        self.wrong_chunks = 0
        """Pieces, manifests and results with a wrong digest, since the start."""
        self.failed_sources = 0

    async def fetch(self, wanted: Announcement, held: Mapping[str, Staged]) -> Staged:
        """Bring a version to this host. `held`: by id, those on it to which deltas may refer.

        Raises:
            NotFetched: no source sent all of it. Another attempt may succeed.
            FetchOverdue: it took too long.
        """
        if wanted.kind is VersionKind.BASE:
            return Staged(wanted, None)
        clock = asyncio.get_running_loop().time
        began, transfer = clock(), _Transfer(wanted, left=self._left[wanted.id])
        try:
            async with asyncio.timeout(FETCH_DEADLINE_S):
                directory = await self._in_place(transfer)
                in_place = directory is not None
                if directory is None and (directory := await self._staging.arrived(wanted)):
                    transfer.bytes = wanted.bytes
                if directory is None:
                    directory = await self._copied(transfer, held)
        except BaseException as error:
            await self._staging.discard(wanted.id)
            if isinstance(error, NotFetched):
                del self._left[wanted.id]  # no source was left; the next attempt asks all again
            if not isinstance(error, TimeoutError):
                raise
            raise FetchOverdue(
                f"policy version {wanted.id} was not fetched within {FETCH_DEADLINE_S:g} s "
                f"({_told(transfer.failures)})"
            ) from None
        del self._left[wanted.id]
        self._without_deltas.discard(wanted.id)
        seconds = round(clock() - began, 3)
        counts = (transfer.bytes, transfer.peer_bytes)
        return Staged(wanted, directory, in_place, seconds, *counts)

    async def offer(self, staged: Staged) -> None:
        """Let other servers fetch the copy from this one."""
        if self._own_url and staged.directory is not None and not staged.in_place:
            await self._versions.add_source(staged.announced.version, self._own_url)

    async def discard(self, staged: Staged) -> None:
        """Delete the copy, after the entry that leads other servers to it."""
        if staged.directory is None or staged.in_place:
            return
        if self._own_url:
            await self._versions.remove_source(staged.announced.version, self._own_url)
        await self._staging.discard(staged.directory.name)

    async def _in_place(self, transfer: _Transfer) -> Path | None:
        for source in await self._versions.sources(transfer.wanted.version):
            if source.startswith(HTTP) or source in transfer.left:
                continue
            try:
                found = await self._staging.in_place(source, transfer.wanted)
            except WrongDigest as error:
                self._leave(transfer, source, error)
            else:
                if found is not None:
                    return found
        return None

    async def _copied(self, transfer: _Transfer, held: Mapping[str, Staged]) -> Path:
        wanted = transfer.wanted
        text, manifest = await self._manifest(transfer, wanted)
        chain = await self._chain(transfer, manifest, held)
        if chain:
            try:
                await self._staging.open(wanted.id)
                await self._fold(transfer, chain, held)
                return await self._staging.finish(wanted.id, text)
            except (WrongDigest, BadDelta) as error:
                self._without_deltas.add(wanted.id)
                log.warning("delta.unusable", version=wanted.id, reason=str(error))
            except NotFetched as error:
                log.info("delta.missing", version=wanted.id, reason=str(error))
        await self._staging.open(wanted.id)
        for name, parts in manifest.files.items():
            await self._file(transfer, wanted, name, parts)
        return await self._staging.finish(wanted.id, text)

    async def _chain(
        self, transfer: _Transfer, manifest: Manifest, held: Mapping[str, Staged]
    ) -> list[tuple[Announcement, Manifest]]:
        """The deltas from a held version to the wanted one, oldest first; empty if there is none,
        or if the whole files are smaller."""
        usable = {i: staged.announced.version for i, staged in held.items() if staged.directory}
        is_delta = transfer.wanted.kind is VersionKind.DELTA
        if not usable or not is_delta or transfer.wanted.id in self._without_deltas:
            return []
        oldest = min(usable.values())
        known = await self._versions.between(oldest, transfer.wanted.version)
        links = chain_of(transfer.wanted, known, usable)
        chain = []
        try:
            for link in links[:-1]:
                chain.append((link, (await self._manifest(transfer, link))[1]))
        except NotFetched as error:
            log.info("delta.missing", version=transfer.wanted.id, reason=str(error))
            return []
        chain = [*chain, (transfer.wanted, manifest)] if links else []
        if folded_bytes([each for _, each in chain]) >= manifest.full_bytes:
            return []
        return chain

    async def _fold(
        self,
        transfer: _Transfer,
        chain: Sequence[tuple[Announcement, Manifest]],
        held: Mapping[str, Staged],
    ) -> None:
        """Fetch the deltas and compute the result. Files without a delta are fetched whole."""
        wanted, manifest = chain[-1]
        parent = held[chain[0][0].parent].directory
        assert parent is not None, "chain_of has chosen it"
        folded = folded_files([each for _, each in chain])
        for name, parts in manifest.files.items():
            if name not in folded:
                await self._file(transfer, wanted, name, parts)
                continue
            deltas = []
            for link, its in chain:
                # Only the newest keeps its name, so that others can fetch it from here.
                kept = name + DELTA_SUFFIX if link is wanted else f"{link.id}.{name}{PARTIAL}"
                await self._file(transfer, link, name + DELTA_SUFFIX, its.deltas[name], kept)
                deltas.append(kept)
            try:
                await self._staging.fold(wanted.id, name, parent, deltas, parts)
            except (WrongDigest, BadDelta):
                self.wrong_chunks += 1
                raise

    async def _manifest(self, transfer: _Transfer, version: Announcement) -> tuple[bytes, Manifest]:
        """Raises `NotFetched`."""
        failures = {}
        trainers, peers = await self._sources(version, transfer.left)
        for source in [*trainers, *peers]:
            try:
                text = await self._read(source, version, MANIFEST)
                return text, checked_manifest(text, version)
            except SourceFailed as error:
                failures[source] = str(error)
            except GrpoError as error:  # a wrong digest, or invalid in spite of the right one
                self._leave(transfer, source, error)
        raise NotFetched(_no_source(version, transfer.failures | failures))

    async def _file(
        self,
        transfer: _Transfer,
        version: Announcement,
        name: str,
        parts: FileParts,
        kept_as: str = "",
    ) -> None:
        """Fetch one file of `version` into the copy.

        Raises:
            WrongDigest: a chunk of a delta is wrong. Chunks of other files are fetched elsewhere.
            NotFetched: no source has the rest of it.
        """
        target, rest = kept_as or name, list(parts.spans())
        await self._staging.write(transfer.wanted.id, target, 0, b"")
        failed: set[str] = set()
        while rest:
            async with self._slot(transfer, version, failed) as (slot, is_peer):
                try:
                    while rest:
                        piece = await self._piece(slot.source, version, name, rest[0])
                        transfer.bytes += len(piece)
                        transfer.peer_bytes += len(piece) * is_peer
                        await self._staging.write(transfer.wanted.id, target, rest[0][0], piece)
                        rest.pop(0)
                        if not await self._versions.renew_slot(slot):
                            break  # it took too long, and another server has the slot
                except SourceFailed as error:
                    self.failed_sources += 1
                    failed.add(slot.source)
                    transfer.failures[slot.source] = str(error)
                    log.warning("source.failed", source=slot.source, reason=str(error))
                except WrongDigest as error:
                    self._leave(transfer, slot.source, error)
                    if name.endswith(DELTA_SUFFIX):
                        raise

    async def _piece(
        self, source: str, version: Announcement, name: str, span: tuple[int, int, str]
    ) -> bytes:
        first, size, digest = span
        piece = await self._read(source, version, name, first, size)
        if len(piece) != size:
            raise SourceFailed(f"{name} is truncated: {len(piece)} bytes instead of {size}")
        if sha256_of(piece) != digest:
            raise WrongDigest(f"{name} of {version.id}: wrong digest at byte {first}")
        return piece

    async def _read(
        self,
        source: str,
        version: Announcement,
        name: str,
        first: int = 0,
        size: int | None = None,
    ) -> bytes:
        try:
            async with asyncio.timeout(CHUNK_DEADLINE_S):
                return await self._transport.read(f"{source}/{version.id}/{name}", first, size)
        except TimeoutError:
            raise SourceFailed(
                f"{name} of {version.id}: no answer within {CHUNK_DEADLINE_S:g} s"
            ) from None

    @contextlib.asynccontextmanager
    async def _slot(
        self, transfer: _Transfer, version: Announcement, failed: set[str]
    ) -> AsyncIterator[tuple[Slot, bool]]:
        """A slot for this server: of the trainer if it has a free one, else of any other server,
        which the second value says. Waits while all slots are taken. Raises `NotFetched` if no
        source is left."""
        while True:
            trainers, peers = await self._sources(version, failed | transfer.left)
            if not trainers and not peers:
                raise NotFetched(_no_source(version, transfer.failures))
            if (slot := await self._versions.take_slot([*trainers, *peers])) is not None:
                break
            await asyncio.sleep(random.uniform(*ASK_AGAIN_S))
        try:
            yield slot, slot.source not in trainers
        finally:
            await self._versions.release_slot(slot)

    async def _sources(
        self, version: Announcement, unusable: set[str]
    ) -> tuple[list[str], list[str]]:
        """The trainer's URLs, and those of a few other servers in a random order."""
        trainers = [
            source
            for source in await self._versions.sources(version.version)
            if source.startswith(HTTP) and source not in unusable
        ]
        without = {self._own_url} | unusable
        some = await self._versions.peers(version.version, PEERS_ASKED + len(without))
        peers = [source for source in some if source not in without][:PEERS_ASKED]
        random.shuffle(peers)
        return trainers, peers

    def _leave(self, transfer: _Transfer, source: str, error: GrpoError) -> None:
        """Ask this source no more for this version."""
        self.wrong_chunks += 1
        transfer.left.add(source)
        transfer.failures[source] = str(error)
        log.warning("weights.wrong_digest", source=source, reason=str(error))


def _no_source(version: Announcement, failures: Mapping[str, str]) -> str:
    return (
        f"no source has all files of policy version {version.id} ({_told(failures)}); start the "
        "trainer, or let this server read its files: --weights-dir <its --save-path>/served_weights"
    )


def _told(failures: Mapping[str, str]) -> str:
    return "; ".join(f"{source}: {why}" for source, why in failures.items()) or "none is known"


def chain_of(
    wanted: Announcement, known: Iterable[Announcement], held: Iterable[str]
) -> list[Announcement]:
    """The deltas that lead from one of the held ids to `wanted`, oldest first; empty if one of them
    is missing."""
    by_id, usable = {each.id: each for each in known}, set(held)
    chain = [wanted]
    while chain[0].kind is VersionKind.DELTA and chain[0].parent not in usable:
        parent = by_id.get(chain[0].parent)
        if parent is None:
            return []
        chain.insert(0, parent)
    return chain if chain[0].kind is VersionKind.DELTA else []


def folded_bytes(chain: Sequence[Manifest]) -> int:
    """What is fetched to fold the deltas of a chain; 0 for no chain."""
    if not chain:
        return 0
    folded = folded_files(chain)
    whole = sum(parts.bytes for name, parts in chain[-1].files.items() if name not in folded)
    return whole + sum(each.deltas[name].bytes for each in chain for name in folded)


def folded_files(chain: Sequence[Manifest]) -> set[str]:
    """Files that have a delta in every version of the chain."""
    return set(chain[-1].files).intersection(*(each.deltas for each in chain))
