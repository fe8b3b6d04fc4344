from __future__ import annotations

import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_local import ports
from grpo_local.ports import free_port

ELSEWHERE = """
import sys
from pathlib import Path
from grpo_local import ports
ports._GIVEN_TO_CLIENTS, ports._LOWEST = Path(sys.argv[1]), int(sys.argv[2])
print(ports.free_port())
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kernel is said to give to clients."""
    told = tmp_path / "range"
    monkeypatch.setattr(ports, "_GIVEN_TO_CLIENTS", told)
    return told


@pytest.fixture
def only(told: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Listens on the single port below the clients', which nothing else asks for: tests that run
    beside this one take theirs from 20000 on."""
    with socket.socket() as server:
        while True:
            try:
                server.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 20_000)))
                break
            except OSError:
                continue
        port = server.getsockname()[1]
        monkeypatch.setattr(ports, "_LOWEST", port)
        told.write_text(f"{port + 1}\t60999\n")
        yield server


def test_it_lies_below_what_clients_get(told: Path) -> None:
    told.write_text("20010\t60999\n")
    assert all(20_000 <= free_port() < 20_010 for _ in range(3))


def test_a_free_port_is_given_once_on_this_machine(told: Path, only: socket.socket) -> None:
    """Even while nobody listens on it."""
    port: int = only.getsockname()[1]
    assert free_port() != port, "somebody listens"
    only.close()
    assert free_port() == port
    assert free_port() != port
    command = [sys.executable, "-c", ELSEWHERE, str(told), str(port)]
    assert int(subprocess.check_output(command)) != port


@pytest.mark.parametrize("said", ["1024\t65535\n", None])
def test_without_room_below_the_kernel_chooses(said: str | None, told: Path) -> None:
    if said is not None:
        told.write_text(said)
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
