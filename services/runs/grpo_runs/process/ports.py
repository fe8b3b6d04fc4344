"""Chooses free TCP ports for servers that start to listen much later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_GIVEN_TO_CLIENTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 20_000
"""Other servers of the user have lower ports."""
_ATTEMPTS = 200


def free_port() -> int:
    """A TCP port of the loopback interface on which nothing listens. No other caller gets it before
    this process ends.

    It is outside the range that the kernel gives to clients. Otherwise a client could take it
    before the server listens, or connect to itself while the server is down. If that range leaves
    no port above 20000, the port is from that range.

    Raises:
        OSError: no port is free.
    """
    highest = int(_GIVEN_TO_CLIENTS.read_text().split()[0]) if _GIVEN_TO_CLIENTS.exists() else 0
    below = range(_LOWEST, highest)
    for port in random.SystemRandom().sample(below, min(_ATTEMPTS, len(below))):
        if _claim(port):
            return port
    while True:
        with socket.socket() as probe:  # the kernel chooses
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if _claim(port):
            return port


def _claim(port: int) -> bool:
    """Reserve a port by an abstract unix socket, which exists until this process ends."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0grpo-port-{port}")
        # After the claim, since an owner of the port could not bind it during this probe.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        claim.close()
        return False
    claim.detach()  # stays open until this process ends
    return True
