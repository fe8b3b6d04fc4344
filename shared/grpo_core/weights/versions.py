"""Versions of the weights: what the trainer announces, and the manifest of a version's files.

Every version is a directory that never changes: `<epoch>-<step>/` with the files of a model or an
adapter and with `manifest.json`. A server fetches files in chunks. Each chunk has a digest in the
manifest, and the announcement has the manifest's digest, so a server trusts no source.

    1-5/model.safetensors           the result
        model.safetensors.delta     how it differs from the parent's file
        config.json
        manifest.json
"""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, Field

from grpo_core.errors import GrpoError, parsing
from grpo_core.weights.ref import WeightKind
from grpo_core.wire.fields import Step
from grpo_core.wire.policy_version import PolicyVersion

CHUNK_BYTES = 8 << 20
MANIFEST, DELTA_SUFFIX = "manifest.json", ".delta"
NO_PARENT = ""
_VERSION_ID, _FILE_NAME = re.compile(r"\d+-\d+"), re.compile(r"\w[\w.-]*")

FileName = Annotated[str, Field(max_length=255, pattern=r"^\w[\w.-]*$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class VersionKind(StrEnum):
    """What a server has to fetch for a version."""

    BASE = "base"
    """Nothing: the model that every server was started with."""
    FULL = "full"
    """A whole model."""
    DELTA = "delta"
    """The changes since the parent, or the whole model."""
    ADAPTER = "adapter"

    @property
    def weights(self) -> WeightKind:
        if self is VersionKind.BASE:
            return WeightKind.BASE
        return WeightKind.ADAPTER if self is VersionKind.ADAPTER else WeightKind.CHECKPOINT


class WrongDigest(GrpoError):
    """Bytes differ from the digest that was announced for them."""


class FileParts(BaseModel, frozen=True, extra="forbid"):
    """Size and chunks of one file. `chunks`: the SHA-256 of each `CHUNK_BYTES`, in order."""

    bytes: Annotated[int, Field(ge=0)]
    chunks: tuple[Sha256, ...]

    @classmethod
    def of(cls, path: Path) -> Self:
        """Raises `OSError`."""
        with path.open("rb") as file:
            pieces = iter(lambda: file.read(CHUNK_BYTES), b"")
            chunks = tuple(map(sha256_of, pieces))
        return cls(bytes=path.stat().st_size, chunks=chunks)

    def spans(self) -> Iterator[tuple[int, int, str]]:
        """(first byte, number of bytes, digest) of each chunk."""
        for number, digest in enumerate(self.chunks):
            first = number * CHUNK_BYTES
            yield first, min(CHUNK_BYTES, self.bytes - first), digest


class Manifest(BaseModel, frozen=True, extra="forbid"):
    """The files of a version. `files`: the result, by name. `deltas`: for some of them, the file
    `<name>.delta`, from which and from the parent's file the result can be computed."""

    files: dict[FileName, FileParts]
    deltas: dict[FileName, FileParts] = {}

    @classmethod
    def of(cls, directory: Path) -> Self:
        """Read all files of a directory. Raises `OSError`."""
        found = {
            path.name: FileParts.of(path)
            for path in sorted(directory.iterdir())
            if path.is_file() and path.name != MANIFEST
        }
        deltas = {n: parts for n, parts in found.items() if n.endswith(DELTA_SUFFIX)}
        return cls(
            files={n: parts for n, parts in found.items() if n not in deltas},
            deltas={n.removesuffix(DELTA_SUFFIX): parts for n, parts in deltas.items()},
        )

    @classmethod
    def parse(cls, text: bytes, sha256: str) -> Self:
        """Raises `WrongDigest`, `ProtocolViolation`."""
        if sha256_of(text) != sha256:
            raise WrongDigest(f"{MANIFEST} does not have the announced digest {sha256[:12]}…")
        with parsing(MANIFEST):
            return cls.model_validate_json(text)

    @property
    def text(self) -> str:
        return self.model_dump_json(exclude_defaults=True)

    @property
    def digest(self) -> str:
        """SHA-256 over the names and chunk digests of the result: equal for equal weights, however
        they travel."""
        total = hashlib.sha256()
        for name, parts in sorted(self.files.items()):
            total.update(f"{name} {parts.bytes} {' '.join(parts.chunks)}\n".encode())
        return total.hexdigest()

    @property
    def full_bytes(self) -> int:
        return _bytes_of(self.files)

    @property
    def delta_bytes(self) -> int:
        """What a server fetches that has the parent."""
        whole = {name: parts for name, parts in self.files.items() if name not in self.deltas}
        return _bytes_of(self.deltas) + _bytes_of(whole)


def _bytes_of(files: Mapping[str, FileParts]) -> int:
    return sum(parts.bytes for parts in files.values())


class VersionedRecord(BaseModel, frozen=True, extra="ignore"):
    """A Redis hash or stream entry with text values. Unknown fields are ignored, so that a newer
    process may write more of them."""

    epoch: Step
    step: Step

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.epoch, self.step)

    def on_the_wire(self) -> dict[str, str]:
        plain = self.model_dump(mode="json", exclude_none=True)
        return {
            name: str(int(value) if isinstance(value, bool) else value)
            for name, value in plain.items()
        }

    @classmethod
    def from_wire(cls, fields: dict[str, str]) -> Self:
        """Raises `ProtocolViolation` with the invalid fields."""
        with parsing(f"the record {cls.__name__} in Redis has invalid fields"):
            return cls.model_validate(fields)


class Announcement(VersionedRecord):
    """One entry of the stream of versions.

    `parent`: the id of the version to which the deltas refer. `digest`: that of the manifest.
    `restarts`: whether the engine restarts on these weights instead of loading them while it runs.
    `model`: the trainer's --model; "" if unknown.
    """

    kind: VersionKind
    parent: str = NO_PARENT
    digest: str = ""
    manifest_sha256: str = ""
    bytes: int = 0
    restarts: bool = False
    model: str = ""

    @property
    def id(self) -> str:
        return version_id(self.version)


def same_model(one: str, other: str) -> bool:
    """Whether two --model options may name the same model: a directory's place may differ from
    host to host, its name does not. "" is unknown, and may be any."""
    return len({Path(one).name, Path(other).name} - {""}) < 2


def sha256_of(text: bytes | memoryview) -> str:
    """In hexadecimal."""
    return hashlib.sha256(text).hexdigest()


def version_id(version: PolicyVersion) -> str:
    """`<epoch>-<step>`: the name of a version's directory, and of its entry in Redis."""
    return f"{version.epoch}-{version.step}"


def version_of(text: str) -> PolicyVersion:
    """The inverse of `version_id`. Raises `ValueError`."""
    epoch, step = text.split("-")
    return PolicyVersion(int(epoch), int(step))


def file_below(root: Path, version: str, name: str) -> Path | None:
    """The file of a version in a directory of versions, for a route that serves it; None if there
    is none, or if a word is no id or no file's name."""
    if not (_VERSION_ID.fullmatch(version) and _FILE_NAME.fullmatch(name)):
        return None
    path = root / version / name
    try:
        return path if path.is_file() else None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return None
