"""Options of the TCP connections of all clients: a silent network breaks them.

A firewall, a NAT or a host that vanishes may drop the packets of an open connection without a word.
A request then waits for its whole deadline, and a repeat on another connection of the same pool
waits as long. The kernel notices it sooner: it closes a connection whose packets the other host
does not acknowledge. A process that is busy or stopped is no such host, because its kernel answers.
But a request that is larger than that kernel's buffer breaks, too, if the process reads none of it.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from grpo_core.listening import LOOPBACK
from grpo_core.security import is_loopback

SILENT_S = 30
"""A connection is closed if the other host has acknowledged nothing, or taken nothing of what waits
to be sent, for so long."""
_IDLE_S, _INTERVAL_S = 10, 5

TCP_OPTIONS = {
    socket.TCP_KEEPIDLE: _IDLE_S,
    socket.TCP_KEEPINTVL: _INTERVAL_S,
    socket.TCP_KEEPCNT: (SILENT_S - _IDLE_S) // _INTERVAL_S,
    # Of sent data: the kernel does not probe while it waits for an acknowledgement.
    socket.TCP_USER_TIMEOUT: SILENT_S * 1000,
}
SOCKET_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, option, value) for option, value in TCP_OPTIONS.items()),
]


def make_socket(address: tuple[int, int, int, str, tuple[Any, ...]]) -> socket.socket:
    """A socket with these options. Args: address: an entry of `socket.getaddrinfo`"""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    for option in SOCKET_OPTIONS:
        made.setsockopt(*option)
    return made


def proxy_for(url: str) -> str | None:
    """As httpx reads it from the environment, which it does not with a transport of the caller;
    aiohttp would read it for each request, in a thread. None for loopback, also without NO_PROXY:
    a proxy on another host has a loopback of its own."""
    parts = urlsplit(url)
    if is_loopback(parts.hostname or "") or proxy_bypass(parts.hostname or ""):
        return None
    proxies = getproxies()
    proxy = proxies.get(parts.scheme, proxies.get("all"))
    return proxy if proxy is None or "://" in proxy else f"http://{proxy}"


def no_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which no library uses a proxy for loopback. `no_proxy` hides `NO_PROXY`."""
    known = environment.get("no_proxy") or environment.get("NO_PROXY")
    value = "*" if known == "*" else ",".join(filter(None, [known, LOOPBACK, "localhost"]))
    return {"NO_PROXY": value, "no_proxy": value}
