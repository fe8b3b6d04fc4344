"""Writes each published version of the weights into a directory of its own, with its manifest."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from grpo_core.tree.weights import SERVED_KEPT
from grpo_core.weights.delta import write_delta
from grpo_core.weights.directory_checks import MODEL_WEIGHTS_GLOB
from grpo_core.weights.ref import WeightKind
from grpo_core.weights.versions import (
    DELTA_SUFFIX,
    MANIFEST,
    NO_PARENT,
    Announcement,
    Manifest,
    VersionKind,
    sha256_of,
    version_id,
    version_of,
)
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.atomic_files import (
    make_directory,
    remove_directory,
    remove_file,
    remove_unfinished,
    whole_directory,
)
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.model.policy import CausalLM

ANCHOR_EVERY = 20
"""Of this many versions one at least is whole, which limits how many deltas a server applies."""
LARGEST_DELTA, LARGEST_DELTAS = 0.4, 1.0
"""Fractions of the whole size: of one delta, and of all since the newest whole version. Beyond them
the whole files are as good, and take no more disk space."""
DELTA_BYTES_PER_WEIGHT = 2


class VersionDirectories:
    """Args:
    root: the directory of all versions
    with_deltas: whether servers can use deltas
    """

    def __init__(self, root: Path, with_deltas: bool = False) -> None:
        self.root = root
        self._with_deltas = with_deltas
        self._parent: PolicyVersion | None = None
        self._deltas = self._delta_bytes = 0

    def prepare(self) -> None:
        """Create the root, and remove unfinished directories of a trainer that was killed."""
        make_directory(self.root)
        remove_unfinished(self.root)

    def path_of(self, version: PolicyVersion) -> Path:
        return self.root / version_id(version)

    def has(self, version: PolicyVersion) -> bool:
        """Whether the version was written here."""
        return (self.path_of(version) / MANIFEST).is_file()

    def write(
        self,
        version: PolicyVersion,
        weights: TrainedWeights,
        policy: CausalLM,
        reason: str = "",  # noqa: ARG002
    ) -> Announcement:
        """Write the version completely or not at all.

        Args:
            reason: why files are needed; "" where another way would do

        Raises:
            CheckpointNotSaved: a file could not be written, e.g. the disk is full.
        """
        with whole_directory(self.path_of(version)) as directory:
            weights.write_into(policy, directory)
            has_deltas = self._takes_deltas(policy) and self._write_deltas(directory)
            manifest = Manifest.of(directory)
            one, whole = manifest.delta_bytes, manifest.full_bytes
            is_too_large = one > LARGEST_DELTA * whole
            is_too_large |= self._delta_bytes + one > LARGEST_DELTAS * whole
            if has_deltas and is_too_large:
                for name in manifest.deltas:
                    (directory / (name + DELTA_SUFFIX)).unlink()
                manifest, has_deltas = manifest.model_copy(update={"deltas": {}}), False
            (directory / MANIFEST).write_text(manifest.text)
        parent = version_id(self._parent) if has_deltas and self._parent else NO_PARENT
        self._parent = version
        self._deltas = self._deltas + 1 if has_deltas else 0
        self._delta_bytes = self._delta_bytes + manifest.delta_bytes if has_deltas else 0
        return announcement_of(version, weights, manifest, parent)

    def close(self) -> None:
        """Nothing to release."""

    def remove_older(self, in_use: Collection[str]) -> list[PolicyVersion]:
        """Remove what no server needs any more; returns the versions that are gone.

        The newest two stay, and the newest whole version. Of versions between these, only the
        deltas stay.

        Args:
            in_use: ids of versions that servers read or fetch
        """
        found = sorted(self._versions())
        anchor = max((v for v, path in found if not _deltas(path)), default=None)
        removed = []
        for version, path in found[:-SERVED_KEPT]:
            if path.name in in_use or version == anchor:
                continue
            if anchor is None or version > anchor:
                for delta in _deltas(path):
                    remove_file(delta.with_suffix(""))
            elif remove_directory(path):
                removed.append(version)
        return removed

    def newest_epoch(self) -> int:
        """The newest epoch that has a directory, or 0."""
        return max((version.epoch for version, _ in self._versions()), default=0)

    def _takes_deltas(self, policy: CausalLM) -> bool:
        """In float32 a delta is nearly as large as the weights."""
        itemsize = next(policy.parameters()).dtype.itemsize
        is_anchor = self._deltas + 1 >= ANCHOR_EVERY
        return self._with_deltas and itemsize == DELTA_BYTES_PER_WEIGHT and not is_anchor

    def _write_deltas(self, directory: Path) -> bool:
        """Whether there is one, which needs the parent's files."""
        if self._parent is None:
            return False
        parent = self.path_of(self._parent)
        sizes = [
            write_delta(parent / file.name, file, directory / (file.name + DELTA_SUFFIX))
            for file in sorted(directory.glob(MODEL_WEIGHTS_GLOB))
            if (parent / file.name).is_file()
        ]
        return any(size is not None for size in sizes)

    def _versions(self) -> list[tuple[PolicyVersion, Path]]:
        if not self.root.is_dir():
            return []
        return [(v, path) for path in self.root.iterdir() if (v := _version_named(path.name))]


def announcement_of(
    version: PolicyVersion, weights: TrainedWeights, manifest: Manifest, parent: str = NO_PARENT
) -> Announcement:
    """Args: parent: id of the version to which deltas refer"""
    kind = VersionKind.DELTA if parent else VersionKind.FULL
    return Announcement(
        **version.fields(),
        kind=VersionKind.ADAPTER if weights.kind is WeightKind.ADAPTER else kind,
        parent=parent,
        digest=manifest.digest,
        manifest_sha256=sha256_of(manifest.text.encode()),
        bytes=manifest.delta_bytes if parent else manifest.full_bytes,
    )


def _deltas(directory: Path) -> list[Path]:
    return list(directory.glob("*" + DELTA_SUFFIX))


def _version_named(name: str) -> PolicyVersion | None:
    """None if it is not the name of a version's directory."""
    try:
        return version_of(name)
    except ValueError:
        return None
