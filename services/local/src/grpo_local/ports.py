"""TCP ports for servers that begin to listen long after their port was chosen."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_GIVEN_TO_CLIENTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 15_000
_ATTEMPTS = 200

_claims: list[socket.socket] = []


def free_port() -> int:
    """A TCP port of the loopback interface, this process' own until it ends.

    Nothing listens on it, and nobody else who asks here is given it. It lies outside of what the
    kernel gives to clients: one of them might get it before the server is there, or, going on to
    connect while the server is down, be connected to itself. Where the kernel leaves no room below
    its own range, it chooses.
    """
    highest = int(_GIVEN_TO_CLIENTS.read_text().split()[0]) if _GIVEN_TO_CLIENTS.exists() else 0
    below = range(_LOWEST, highest)
    for port in random.SystemRandom().sample(below, min(_ATTEMPTS, len(below))):
        if _is_free(port) and _claim(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        chosen: int = probe.getsockname()[1]
        return chosen


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def _claim(port: int) -> bool:
    """By a name that lives in the kernel, as long as this process and for the same network."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0grpo-port-{port}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True
