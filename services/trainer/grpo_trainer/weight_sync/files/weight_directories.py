"""Writes each version of the weights into its own directory, and removes unused ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path

from grpo_core.weights.directory_checks import directory_digest
from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checkpoint.atomic_dir import make_directory, remove_directory, remove_unfinished
from grpo_trainer.config.sync import SERVED_KEPT
from grpo_trainer.errors import CheckpointNotSaved

_NAME = re.compile(r"epoch_(\d+)_step_(\d+)")


class WeightDirectories:
    """Args: root: the server's --weights-dir"""

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self) -> None:
        """Create the root, and remove unfinished directories of a trainer that was killed."""
        make_directory(self.root)
        remove_unfinished(self.root)

    def write(
        self, version: PolicyVersion, kind: WeightKind, write_to: Callable[[Path], None]
    ) -> WeightRef:
        """Args: write_to: writes a complete directory at its argument.

        Raises:
            CheckpointNotSaved: the directory could not be written, e.g. the disk is full.
        """
        target = self.root / f"epoch_{version.epoch}_step_{version.step}"
        write_to(target)
        try:
            digest = directory_digest(target)
        except OSError as error:
            raise CheckpointNotSaved(
                f"{target} was written and cannot be read: {error}; check the disk"
            ) from error
        return WeightRef(version=version, kind=kind, path=target, digest=digest)

    def remove_older(self, in_use: Collection[Path]) -> None:
        """Remove all but the newest two and those in use.

        Args:
            in_use: resolved paths that requests in flight still read
        """
        for _, path in sorted(self._versions())[:-SERVED_KEPT]:
            if path.resolve() not in in_use:
                remove_directory(path)

    def newest_epoch(self) -> int:
        """The newest epoch that has a directory, or 0."""
        return max((version.epoch for version, _ in self._versions()), default=0)

    def _versions(self) -> list[tuple[PolicyVersion, Path]]:
        if not self.root.is_dir():
            return []
        found = ((_NAME.fullmatch(path.name), path) for path in self.root.iterdir())
        return [(PolicyVersion(int(m[1]), int(m[2])), path) for m, path in found if m]
