"""Where the weight socket may lie: in a directory that no other user may enter."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from grpo_core.errors import GrpoError


class UnsafeSocketDirectory(GrpoError):
    """Others could put a socket of theirs in the place of ours."""


def own_directory(directory: Path) -> None:
    """Make it, where it is not there. Raises `UnsafeSocketDirectory`."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    mode, own = stat.S_IMODE(found.st_mode), os.getuid()
    if found.st_uid != own or mode & 0o077:
        raise UnsafeSocketDirectory(
            f"--weights-socket: {directory} belongs to user {found.st_uid} with mode {mode:04o}, "
            f"and others than user {own} must not enter it; name a directory that is not there "
            "yet, or give this one to that user and chmod 700"
        )
