"""The user that a program in a sandbox is, if this process is root: one without any rights."""

from __future__ import annotations

import itertools
import os
from functools import cache
from pathlib import Path

NOBODY = 65534
_FIRST = 2**30
_ALL_USERS = ["0", "0", "4294967295"]
_runs = itertools.count()


@cache
def is_root() -> bool:
    """Whether this process is root of the machine, and not of a user namespace."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == _ALL_USERS


def new_user() -> int:
    """A user that no other program is now: the kernel limits the processes of a user."""
    return _FIRST + (os.getpid() << 8) + next(_runs) % 256


def give(user: int, directory: Path | None, service: Path | None) -> None:
    """Make the user the owner of a directory with all that is in it, and let it connect to the
    socket of a service. Links are not followed."""
    if directory:
        os.chown(directory, user, user)
        for parent, names, files in os.walk(directory):
            for name in names + files:
                os.chown(os.path.join(parent, name), user, user, follow_symlinks=False)
    if service:
        service.chmod(0o666)
