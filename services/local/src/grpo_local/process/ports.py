"""TCP ports for servers that begin to listen long after their port was chosen."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_GIVEN_TO_CLIENTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 20_000
"""Below it are the ports that people choose for servers of their own."""
_ATTEMPTS = 200


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on, given to one caller only until
    this process ends.

    It lies outside of what the kernel gives to clients: one of them might get it before the server
    is there, or, going on to connect while the server is down, be connected to itself. Where the
    kernel leaves nothing from 20000 on, the port is one of the clients'.

    Raises:
        OSError: no port is free.
    """
    highest = int(_GIVEN_TO_CLIENTS.read_text().split()[0]) if _GIVEN_TO_CLIENTS.exists() else 0
    below = range(_LOWEST, highest)
    for port in random.SystemRandom().sample(below, min(_ATTEMPTS, len(below))):
        if _claim(port):
            return port
    while not _claim(port := _chosen_by_the_kernel()):
        pass
    return port


def _claim(port: int) -> bool:
    """By a name in the kernel, which lives as long as this process, and is as local as the port."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0grpo-port-{port}")
        # Only now: for this moment its owner, were it another's, could not bind it.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        claim.close()
        return False
    claim.detach()  # stays open until this process ends
    return True


def _chosen_by_the_kernel() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
