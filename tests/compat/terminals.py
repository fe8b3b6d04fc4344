"""Runs a session of the archived documents: one command per terminal, with the ports they name.

`python -m tests.compat.terminals FILE` runs in a network namespace of its own, which
`run_session` creates. So the ports are free, and nothing outside is reached.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_core.process import ManagedProcess

DEADLINE_S = 900.0
"""Of a trainer; only a failing test waits that long."""
_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40


@dataclass(frozen=True)
class Terminal:
    """`ends`: the session waits for its end; the others are stopped afterwards."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    ends: bool


def has_namespaces() -> bool:
    return subprocess.run([*_UNSHARE, "true"], capture_output=True).returncode == 0


def run_session(terminals: Sequence[Terminal], directory: Path) -> dict[str, int]:
    """Start the terminals in order; returns the exit status of those that end."""
    file = directory / "session.json"
    file.write_text(json.dumps([vars(terminal) for terminal in terminals]))
    done = subprocess.run(
        [*_UNSHARE, sys.executable, "-m", __name__, str(file)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    statuses: dict[str, int] = json.loads(done.stdout)
    return statuses


_UNSHARE = ("unshare", "--net") if os.getuid() == 0 else ("unshare", "--map-root-user", "--net")


def _main(file: Path) -> None:
    _loopback_up()
    terminals = [Terminal(**each) for each in json.loads(file.read_text())]
    with contextlib.ExitStack() as stack:
        started: dict[str, ManagedProcess] = {}
        for terminal in terminals:
            log = file.parent / f"{terminal.name}.log"
            os.chdir(file.parent)
            process = ManagedProcess(terminal.name, terminal.command, log, terminal.environment)
            stack.callback(process.stop, 120.0)
            started[terminal.name] = process
        ending = [terminal.name for terminal in terminals if terminal.ends]
        statuses = {name: started[name].wait(DEADLINE_S) for name in ending}
    json.dump(statuses, sys.stdout)


def _loopback_up() -> None:
    request: Any = struct.pack("16sh", b"lo", _IFF_UP | _IFF_RUNNING)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
