"""Listening sockets of this machine."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

EVERY_ADDRESS = "::"
LOOPBACK = "127.0.0.1"
_TCP_LISTEN = "0A"


def listen(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """Listen on an address. `::` is every address of both families, or of IPv4 if the kernel has no
    IPv6.

    Raises:
        OSError: another process listens there, or this machine has no such address.
    """
    family, host = family_and_host(host)
    return socket.create_server(
        (host, port), family=family, backlog=backlog, dualstack_ipv6=host == EVERY_ADDRESS
    )


def family_and_host(host: str) -> tuple[socket.AddressFamily, str]:
    """What to bind a socket to."""
    if host == EVERY_ADDRESS and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"  # noqa: S104 - as the caller wants
    return socket.AF_INET6 if ":" in host else socket.AF_INET, host


def in_url(host: str) -> str:
    """`::1` → `[::1]`"""
    return f"[{host}]" if ":" in host else host


def url_on_this_host(host: str, port: int) -> str:
    """URL for clients on this host of what listens on an address."""
    return f"http://{LOOPBACK if is_every_address(host) else in_url(host)}:{port}"


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None if the host is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_every_address(host: str) -> bool:
    address = address_of(host)
    return address is not None and address.is_unspecified


def is_own_listener(port: int) -> bool:
    """Whether a process of this user listens at 127.0.0.1 on the port; see /proc/net/tcp in
    proc(5)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ours = [f"0100007F:{port:04X}", _TCP_LISTEN, str(os.getuid())]
    return any([row[1], row[3], row[7]] == ours for row in rows)
