"""What runs a program of a model: `Sandbox.run`, with `Limits`, gives `Ended`.

The paths of `directory` and `readable` are the same inside and outside the sandbox. Everything else
of the host is hidden, apart from the system's programs and libraries, which are read-only.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, TypedDict, Unpack

from grpo_core.errors import GrpoError
from grpo_env.failures import RolloutFailed

MIB = 2**20

SERVICE_URL = "{service_url}"
"""In a value of `environment`: the URL at which the program reaches `service`, without a slash at
the end."""

Reason = Literal["finished", "timeout", "cpu", "memory", "files", "output"]
"""`finished`: the program ended by itself, with any status or signal. Others: the limit that ended
it."""

_SHOWN_CHARACTERS = 4000


class SandboxUnusable(GrpoError):
    """The chosen sandbox does not work on this machine. The message says what to install."""


class SandboxFailed(RolloutFailed):
    """The sandbox did not run a program to its end or to a limit."""


@dataclass(frozen=True)
class Limits:
    """Limits of one run. docs/how-to/sandbox.md says how each sandbox enforces them.

    seconds: from start to end; cpu_s: CPU time of each process; memory_bytes: of all processes;
    file_bytes: of all files that exist at the same time; processes: threads count too;
    open_files: of each process; output_bytes: of standard output and of standard error, each.
    """

    seconds: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 512 * MIB
    file_bytes: int = 64 * MIB
    processes: int = 64
    open_files: int = 256
    output_bytes: int = MIB


@dataclass(frozen=True)
class Ended:
    """How a program ended. status: its exit status, 128 + N after signal N; output, errors: what it
    wrote; seconds: how long it ran."""

    status: int
    output: str
    errors: str
    reason: Reason
    seconds: float

    @property
    def ok(self) -> bool:
        """The program ended by itself, with status 0."""
        return self.reason == "finished" and self.status == 0

    def for_model(self, characters: int = _SHOWN_CHARACTERS) -> str:
        """What a tool answers to the model: the end of output and errors, then how it ended."""
        text = "\n".join(filter(None, (self.output.rstrip(), self.errors.rstrip())))
        if len(text) > characters:
            left_out = len(text) - characters
            text = f"(the first {left_out} characters are left out)\n{text[-characters:]}"
        if self.reason != "finished":
            text += f"\n(ended by the limit: {self.reason})"
        elif self.status:
            text += f"\n(exit status {self.status})"
        return text.strip() or "(no output)"


@dataclass(frozen=True)
class Program:
    """The arguments of `Sandbox.run`."""

    argv: Sequence[str] = ("true",)
    stdin: bytes = b""
    environment: Mapping[str, str] | None = None
    directory: Path | None = None
    readable: Sequence[Path] = ()
    service: Path | None = None
    limits: Limits = Limits()

    def variables(self, path: str, home: str, service_url: str) -> dict[str, str]:
        """All variables of the program, with `SERVICE_URL` replaced."""
        base = {"PATH": path, "HOME": home, "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
        given = (self.environment or {}).items()
        return base | {name: value.replace(SERVICE_URL, service_url) for name, value in given}


class SandboxOptions(TypedDict, total=False):
    """The options of `Sandbox.run`."""

    environment: Mapping[str, str] | None
    directory: Path | None
    readable: Sequence[Path]
    service: Path | None
    limits: Limits


class Sandbox:
    """Runs programs so that they reach nothing but what `run` names.

    kind: `bubblewrap`, `docker:IMAGE` or `none`; python: the Python interpreter inside.
    """

    kind: str
    python: str

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", **options: Unpack[SandboxOptions]
    ) -> Ended:
        """Run a program to its end, or to the first limit. No process of it remains.

        Args:
            environment: added to PATH, HOME and TMPDIR; no other variable of this process is
                visible. `SERVICE_URL` in a value becomes the URL of `service`.
            directory: the working directory, which the program may change. If this process runs as
                root, the directory and its files are given to the user of the program. None: an
                empty directory in memory, which disappears.
            readable: files and directories that the program may read.
            service: a Unix socket of an HTTP server that the program may reach.

        Raises:
            SandboxFailed: the sandbox did not start the program, or the host ended it.
            SandboxUnusable: the sandbox is not installed any more.
            FileNotFoundError: a path of `directory` or `readable` does not exist.
        """
        program = Program(argv, stdin, **options)
        directory = program.directory.resolve(strict=True) if program.directory else None
        return await self._run(replace(program, directory=directory))

    async def _run(self, program: Program) -> Ended:
        raise NotImplementedError


NOBODY = 65534
"""The user that a program in a sandbox is, if this process is root, has no rights: this one, or one
of its own."""
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
