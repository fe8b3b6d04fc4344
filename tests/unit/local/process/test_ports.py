"""Free ports are given once and stay outside the range of clients."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_local.process import ports
from grpo_local.process.ports import free_port

ELSEWHERE = """
import sys
from pathlib import Path
from grpo_local.process import ports
ports._GIVEN_TO_CLIENTS, ports._LOWEST = Path(sys.argv[1]), int(sys.argv[2])
print(ports.free_port())
"""


def test_a_free_port_is_given_once_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while nobody listens on it. The single port below those that the kernel gives to
    clients is one that nothing else asks for: tests that run beside this one take theirs from
    20000 on."""
    told = tmp_path / "range"
    monkeypatch.setattr(ports, "_GIVEN_TO_CLIENTS", told)
    with socket.socket() as server:
        while server.getsockname()[1] == 0:
            with contextlib.suppress(OSError):
                server.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 20_000)))
        port = server.getsockname()[1]
        monkeypatch.setattr(ports, "_LOWEST", port)
        told.write_text(f"{port + 1}\t60999\n")
        assert free_port() != port, "somebody listens"
    assert free_port() == port
    assert free_port() != port
    command = [sys.executable, "-c", ELSEWHERE, str(told), str(port)]
    assert int(subprocess.check_output(command)) != port
