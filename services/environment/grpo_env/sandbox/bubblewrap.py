"""Programs in namespaces of their own, made by `bwrap`: no network, no processes or files of the
host, other than the system's programs and libraries and what `run` names.

An ordinary user needs a user namespace for that, in which the kernel (5.14 or later) counts the
processes. As root, the program runs as a user of its own without rights.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from grpo_env.sandbox import relay
from grpo_env.sandbox.child import LimitedCommand, run_child
from grpo_env.sandbox.interface import (
    Ended,
    Program,
    Sandbox,
    SandboxFailed,
    SandboxUnusable,
    give,
    is_root,
    new_user,
)
from grpo_env.sandbox.namespace import Namespace
from grpo_env.sandbox.syscalls import seccomp_filter

_HOME = "/tmp"
_SOCKET = "/run/service.sock"
_RELAY = "/run/relay.py"
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/sbin")
"""Directories that programs see as they are."""
_SYSTEM_FILES = ("alternatives", "ld.so.cache", "localtime", "mime.types", "ssl/certs")
"""Of /etc."""
_OF_PREFIX = ("bin", "include", "lib", "lib64", "pyvenv.cfg", "share")
"""Of a Python installation. A file such as `pip.conf` may hold a password."""
_PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
_IN_MEMORY = ("/tmp", "/dev/shm")
_PROBE_S = 20
_NO_PROC = "Can't mount proc"


class Bubblewrap(Sandbox):
    """`bwrap`, of Debian's package `bubblewrap`.

    has_proc: whether the program sees `/proc`, of its own processes. A container whose engine hides
    parts of `/proc` cannot mount another one.
    """

    kind = "bubblewrap"
    python = sys.executable

    def __init__(self, has_proc: bool = True) -> None:
        self.has_proc = has_proc

    async def _run(self, program: Program) -> Ended:
        service, argv = program.service, program.argv
        user = new_user() if is_root() else None
        if user:
            await asyncio.to_thread(give, user, program.directory, service)
        mounts = [*_mounts(self.has_proc, program)]
        inside = [self.python, _RELAY, _SOCKET, *argv] if service else argv
        with _filter() as filter_fd, Namespace(program.limits) as namespace:
            bwrap = [*_bwrap(user, filter_fd), *namespace.options]
            command = LimitedCommand(
                [*bwrap, *mounts, "--", *_as_user(user), *inside],
                program.variables(_PATH, _HOME, relay.URL),
                program.limits,
                namespace.kill,
                program.stdin,
                program.directory,
                in_memory=_IN_MEMORY,
                inherited=[filter_fd, *namespace.inherited],
            )
            ended = await run_child(command)
            never_began = ended.reason == "timeout" and not namespace.has_begun
            if not namespace.has_run and (ended.reason == "finished" or never_began):
                said = ended.errors.strip() or f"{ended.reason}, status {ended.status}"
                raise SandboxFailed(f"bwrap did not run a program: {said}")
            return ended


@contextmanager
def _filter() -> Iterator[int]:
    """A file descriptor from which `bwrap` reads the filter of system calls."""
    reader, writer = os.pipe()
    try:
        os.write(writer, seccomp_filter())
        os.close(writer)
        yield reader
    finally:
        os.close(reader)


def _bwrap(user: int | None, filter_fd: int) -> list[str]:
    """Without a user namespace for root, who mounts what the program's user cannot reach. Raises
    `SandboxUnusable`: `bwrap` is not on PATH."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxUnusable(_NOT_INSTALLED)
    # If memory gets scarce, the kernel ends this program before any other.
    own = ["/usr/bin/choom", "-n", "1000", "--", program, "--die-with-parent", "--new-session"]
    spaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    rights = ["--seccomp", str(filter_fd), "--cap-drop", "ALL"]
    if user is None:
        return [*own, *spaces, *rights, "--unshare-user"]
    # Until it becomes the program's user, whose directory nobody else may read.
    kept = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_DAC_READ_SEARCH")
    return [*own, *spaces, *rights, *(word for name in kept for word in ("--cap-add", name))]


def _as_user(user: int | None) -> list[str]:
    """Before the program. If there is none of its name, that is its failure and not `bwrap`'s."""
    words = ["/usr/bin/setpriv", "--no-new-privs"]
    if user is not None:
        words += [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        words += ["--bounding-set=-all", "--inh-caps=-all"]
    return [*words, "--"]


def _mounts(has_proc: bool, program: Program) -> Iterator[str]:
    size, directory, service = str(program.limits.file_bytes), program.directory, program.service
    if has_proc:
        yield from ("--proc", "/proc")
    yield from ("--dev", "/dev")
    for place in _IN_MEMORY:
        yield from ("--perms", "1777", "--size", size, "--tmpfs", place)
    yield from _system()
    for path in program.readable:
        yield from _bind("--ro-bind", path.resolve(strict=True), path.absolute())
    if directory:
        yield from _bind("--bind", directory, directory)
    if service:
        yield from _bind("--ro-bind", service.resolve(), Path(_SOCKET))
        yield from _bind("--ro-bind", Path(relay.__file__), Path(_RELAY))
    # Both are file systems in memory without a limit of their own.
    yield from ("--remount-ro", "/dev", "--remount-ro", "/")
    yield from ("--chdir", str(directory or _HOME))


def _bind(how: str, source: Path, target: Path) -> Iterator[str]:
    """Parents are made first: `bwrap` makes them with mode 0700, for its own user."""
    for parent in reversed(target.parents[:-1]):
        yield from ("--dir", str(parent))
    yield from (how, str(source), str(target))


@cache
def _system() -> tuple[str, ...]:
    """The programs and libraries of the system, and this Python with its packages."""
    words: list[str] = []
    for path in map(Path, SYSTEM):
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            words += ["--ro-bind", str(path), str(path)]
    etc = [Path("/etc") / name for name in _SYSTEM_FILES]
    prefixes = {Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parents[1]}
    of_python = [prefix / name for prefix in sorted(prefixes) for name in _OF_PREFIX]
    for path in [*etc, *of_python]:
        if path.exists() and not path.is_relative_to("/usr"):
            words += _bind("--ro-bind", path.resolve(), path)
    return tuple(words)


_NOT_INSTALLED = (
    "bwrap is not on PATH: `apt-get install bubblewrap`; or choose `--sandbox docker`, or "
    "`--sandbox none`, which runs code of the model on this machine without protection"
)
_NO_NAMESPACES = (
    "bwrap cannot make namespaces here: {error}. In a container, allow them: "
    "ENVIRONMENT_NAMESPACES=on for `make up`, otherwise as docs/how-to/sandbox.md says. On a host: "
    "`sysctl user.max_user_namespaces=10000`, and on Ubuntu `sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0`. Or choose `--sandbox docker`, or `--sandbox "
    "none`, which runs code of the model on this machine without protection"
)


def usable_bubblewrap() -> Bubblewrap:
    """Raises `SandboxUnusable` if `bwrap` cannot run a program here."""
    problem = _problem(has_proc=True)
    if not problem:
        return Bubblewrap()
    if _NO_PROC in problem and not _problem(has_proc=False):
        return Bubblewrap(has_proc=False)
    raise SandboxUnusable(_NO_NAMESPACES.format(error=problem))


def _problem(has_proc: bool) -> str:
    """What `bwrap` says if it fails."""
    user = new_user() if is_root() else None
    mounts = _mounts(has_proc, Program())
    with _filter() as filter_fd:
        done = subprocess.run(
            [*_bwrap(user, filter_fd), *mounts, "--", *_as_user(user), "true"],
            pass_fds=[filter_fd],
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=False,
        )
    return done.stderr.strip().rstrip(".") if done.returncode else ""
