"""The server's own copies of versions that it fetches: directories in memory (/dev/shm).

<staging>/1-5.partial/     being fetched
          1-5.arriving/    being received by the engine's workers; complete with its manifest
          1-5/             complete and verified; it never changes any more
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from grpo_core.errors import GrpoError
from grpo_core.weights.collective import ARRIVING
from grpo_core.weights.delta import apply_delta
from grpo_core.weights.directory_checks import UnusableWeights, inside, make_private
from grpo_core.weights.versions import (
    MANIFEST,
    Announcement,
    FileParts,
    Manifest,
    WrongDigest,
    version_of,
)

FILE_SCHEME = "file"
PARTIAL = ".partial"
_FULL = (errno.ENOSPC, errno.EDQUOT)

T = TypeVar("T")


class NotFetched(GrpoError):
    """A version could not be brought to this host. Another attempt may succeed."""


class StagingFull(NotFetched):
    """The staging directory has no room for a version."""


class Staging:
    """Args:
    directory: for copies; created with the first one
    loads_from: files below it are used in place
    """

    def __init__(self, directory: Path, loads_from: Path) -> None:
        self.directory = directory
        self._loads_from = loads_from

    async def in_place(self, source: str, wanted: Announcement) -> Path | None:
        """The version's directory below a `file://` source, verified; None if this host does not
        have it, or may not load from there.

        Raises:
            WrongDigest: files differ from the announcement.
        """
        parts = urlsplit(source)
        if parts.scheme != FILE_SCHEME:
            return None
        try:
            directory = inside(f"{unquote(parts.path)}/{wanted.id}", self._loads_from)
        except UnusableWeights:
            return None
        return await asyncio.to_thread(_verified, directory, wanted)

    async def arrived(self, wanted: Announcement) -> Path | None:
        """The copy that the engine's workers received and verified; None without one."""
        return await asyncio.to_thread(self._arrived, wanted)

    def _arrived(self, wanted: Announcement) -> Path | None:
        """Deletes those of older versions, which nobody needs any more."""
        for directory in self.directory.glob("*" + ARRIVING):
            if version_of(directory.name.removesuffix(ARRIVING)) < wanted.version:
                shutil.rmtree(directory, ignore_errors=True)
        make_private(self.directory)
        here, done = self.directory / (wanted.id + ARRIVING), self.directory / wanted.id
        try:
            checked_manifest((here / MANIFEST).read_bytes(), wanted)
        except (OSError, GrpoError):
            return None
        shutil.rmtree(done, ignore_errors=True)
        return here.rename(done)

    async def open(self, version: str) -> None:
        """Begin a copy."""
        await self._write(lambda: make_private(self.directory))
        await self._write(lambda: _make_empty(self._partial(version)))

    async def write(self, version: str, name: str, first: int, piece: bytes) -> None:
        """Write a part of a file, which may begin anywhere. Raises `StagingFull`."""
        await self._write(lambda: _write_at(self._partial(version) / name, first, piece))

    async def fold(
        self, version: str, name: str, parent: Path, deltas: Sequence[str], wanted: FileParts
    ) -> None:
        """Compute a file from the parent's file and the deltas that are in the copy already. Of
        these, the ones named `*.partial` are then deleted.

        Raises:
            WrongDigest: the result is not the announced one.
            BadDelta: a delta does not fit.
            StagingFull: there is no room for the result.
        """
        here = self._partial(version)
        found = await self._write(lambda: _fold(parent / name, [here / d for d in deltas], here))
        if await asyncio.to_thread(FileParts.of, found) != wanted:
            raise WrongDigest(f"{name} of {version}, computed from deltas, has another digest")
        found.replace(here / name)
        for delta in deltas:
            if delta.endswith(PARTIAL):
                (here / delta).unlink()

    async def finish(self, version: str, manifest: bytes) -> Path:
        """The directory of the copy, which is now complete."""
        done = self.directory / version
        await self.write(version, MANIFEST, 0, manifest)
        await self.discard_directory(done)
        self._partial(version).rename(done)
        return done

    async def discard(self, version: str) -> None:
        """Delete the copy, complete or not."""
        await self.discard_directory(self.directory / version)
        await self.discard_directory(self._partial(version))

    async def clear(self) -> None:
        """Delete all copies: those of an earlier server of this name, or at the end."""
        await self.discard_directory(self.directory)

    @staticmethod
    async def discard_directory(directory: Path) -> None:
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def _partial(self, version: str) -> Path:
        return self.directory / (version + PARTIAL)

    async def _write(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            if error.errno not in _FULL:
                raise NotFetched(f"cannot write into {self.directory}: {error}") from error
            raise StagingFull(
                f"{self.directory} has no room for another version of the weights; start the "
                "server with --staging-dir <a directory with room for three versions>, or give "
                "/dev/shm more room (SHM_SIZE for docker compose)"
            ) from error


def _verified(directory: Path, wanted: Announcement) -> Path:
    try:
        text = (directory / MANIFEST).read_bytes()
        manifest = checked_manifest(text, wanted)
        for name, parts in manifest.files.items():
            if FileParts.of(directory / name) != parts:
                raise WrongDigest(f"{directory / name} differs from the announced file")
    except OSError as error:
        raise WrongDigest(f"{directory} is not complete: {error}") from error
    return directory


def checked_manifest(text: bytes, wanted: Announcement) -> Manifest:
    """Raises `WrongDigest` if it is not the manifest that was announced."""
    manifest = Manifest.parse(text, wanted.manifest_sha256)
    if manifest.digest != wanted.digest:
        raise WrongDigest(f"the files of {wanted.id} do not have the announced digest")
    return manifest


def _make_empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, mode=0o700)


def _write_at(path: Path, first: int, piece: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.seek(first)
        file.write(piece)


def _fold(file: Path, deltas: Sequence[Path], here: Path) -> Path:
    """Apply the deltas, oldest first."""
    for number, delta in enumerate(deltas):
        result = here / f"result{PARTIAL}{number}"
        apply_delta(file, delta, result)
        if number:
            file.unlink()
        file = result
    return file
