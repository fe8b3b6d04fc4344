"""Programs in namespaces of their own, made by `bwrap`: no network, no processes or files of the
host, other than the system's programs and libraries and what `run` names.

As root, `bwrap` makes the namespaces and the program runs as the user `nobody`; otherwise it runs
as this user. Either way it is in a user namespace of its own, in which the kernel (5.14 or later)
counts its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from grpo_env.sandbox import relay
from grpo_env.sandbox.child import Command, run_child
from grpo_env.sandbox.interface import (
    NOBODY,
    Ended,
    Limits,
    SandboxUnusable,
    give_to_nobody,
    program_environment,
)

_HOME = "/tmp"
_SOCKET = "/run/service.sock"
_RELAY = "/run/relay.py"
_SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/sbin")
_SYSTEM_FILES = ("alternatives", "ld.so.cache", "localtime", "mime.types", "ssl/certs")
"""Of /etc."""
_OF_PREFIX = ("bin", "include", "lib", "lib64", "pyvenv.cfg", "share")
"""Of a Python installation. A file such as `pip.conf` may hold a password."""
_PATH = "/usr/local/bin:/usr/bin:/bin"
_PROBE_S = 20


class Bubblewrap:
    """`bwrap` of Debian's package `bubblewrap`, version 0.8 or later."""

    kind = "bubblewrap"
    python = sys.executable

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        readable: Sequence[Path] = (),
        service: Path | None = None,
        limits: Limits = Limits(),  # noqa: B008 - frozen
    ) -> Ended:
        """See `Sandbox.run`."""
        directory = directory.resolve() if directory else None
        if os.geteuid() == 0:
            if directory:
                await asyncio.to_thread(give_to_nobody, directory)
            if service:
                service.chmod(0o666)
        mounts = [*_mounts(directory, readable, service, limits)]
        variables = program_environment(_path(), _HOME, environment, relay.URL)
        inside = [*_limited(limits), "--", *argv]
        if service:
            inside = [self.python, _RELAY, _SOCKET, *inside]
        try:
            return await run_child(
                Command(
                    [*_bwrap(), *mounts, "--", *_as_nobody(), *inside],
                    variables,
                    limits,
                    _kill,
                    stdin,
                    directory,
                )
            )
        except FileNotFoundError as error:
            raise SandboxUnusable(_NOT_INSTALLED) from error


def _path() -> str:
    return f"{Path(sys.executable).parent}:{_PATH}"


def _kill(pid: int) -> None:
    """The kernel ends the first process of the namespace with `bwrap`, and all others with it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _bwrap() -> list[str]:
    """As root, without a user namespace: it mounts what `nobody` cannot reach."""
    own = ["choom", "-n", "1000", "--", "bwrap", "--die-with-parent", "--new-session"]
    spaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    if os.geteuid():
        return [*own, *spaces, "--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
    needed = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
    return [*own, *spaces, "--cap-drop", "ALL"] + [
        word for name in needed for word in ("--cap-add", name)
    ]


def _as_nobody() -> list[str]:
    if os.geteuid():
        return []
    user = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    powers = ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
    return ["setpriv", *user, *powers, "unshare", "--user", "--map-current-user"]


def _limited(limits: Limits) -> list[str]:
    """RLIMIT_DATA, not RLIMIT_AS: programs such as node reserve much more than they use."""
    return [
        "prlimit",
        "--core=0",
        f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}",
        f"--data={limits.memory_bytes}",
        f"--fsize={limits.file_bytes}",
        f"--nofile={limits.open_files}",
        f"--nproc={limits.processes}",
    ]


def _mounts(
    directory: Path | None, readable: Sequence[Path], service: Path | None, limits: Limits
) -> Iterator[str]:
    size = str(limits.file_bytes)
    yield from ("--proc", "/proc", "--dev", "/dev")
    yield from ("--perms", "1777", "--size", size, "--tmpfs", "/dev/shm")
    yield from ("--perms", "1777", "--size", size, "--tmpfs", "/tmp")
    yield from _system()
    for path in readable:
        yield from _bind("--ro-bind", path.resolve(), path.absolute())
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
    words = ["--ro-bind", "/usr", "/usr"]
    for path in map(Path, _SYSTEM):
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
    "bwrap is not installed: `apt-get install bubblewrap`; or choose `--sandbox docker`, or "
    "`--sandbox none`, which runs code of the model on this machine without protection"
)
_NO_NAMESPACES = (
    "bwrap cannot make namespaces here: {error}. In a container, its engine forbids them: see "
    "docs/how-to/sandbox.md. On a host, allow them: `sysctl user.max_user_namespaces=10000`, and "
    "on Ubuntu `sysctl kernel.apparmor_restrict_unprivileged_userns=0`. Or choose `--sandbox "
    "docker`, or `--sandbox none`, which runs code of the model on this machine without protection"
)


def require_bubblewrap() -> None:
    """Raises `SandboxUnusable` if `bwrap` cannot run a program here."""
    if shutil.which("bwrap") is None:
        raise SandboxUnusable(_NOT_INSTALLED)
    limits = Limits()
    command = [*_bwrap(), *_mounts(None, (), None, limits), "--", *_as_nobody()]
    done = subprocess.run(
        [*command, *_limited(limits), "--", "true"],
        capture_output=True,
        text=True,
        timeout=_PROBE_S,
        check=False,
    )
    if done.returncode:
        raise SandboxUnusable(_NO_NAMESPACES.format(error=done.stderr.strip()))
