"""Ports for servers that are killed and started again on the same one."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 15_000
_ATTEMPTS = 200


def lasting_ports(count: int) -> list[int]:
    """Free TCP ports of the loopback interface, outside of what the kernel gives to clients.

    While a server is down, clients go on connecting to its port. Were it one of theirs, one of
    them would sooner or later get it as its own, be connected to itself, and keep the server out.
    """
    highest = int(_RANGE.read_text().split()[0]) - 1
    found: list[int] = []
    for port in random.SystemRandom().sample(range(_LOWEST, highest), _ATTEMPTS):
        if len(found) == count:
            break
        if _is_free(port):
            found.append(port)
    assert len(found) == count, f"fewer than {count} ports are free from {_LOWEST} to {highest}"
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
