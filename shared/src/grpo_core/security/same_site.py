"""Refuses what a browser sends on behalf of a web page elsewhere. Plain ASGI, for every server.

A browser that can reach a server lets any page that it shows send requests there, and some of ours
change the run by a bare GET. What answers them says nothing to that page, but it need not read the
answer. A page whose host name was pointed at the server (DNS rebinding) reads it as well, and its
requests look like those of the server's own pages but for the name in `Host`.

Browsers mark requests to loopback addresses and over TLS with `Sec-Fetch-Site` (W3C Fetch
Metadata), which no page can set or leave out; elsewhere `Origin` or `Referer` may name the page. A
bare GET over plain HTTP to another address, from a page that has its `Referer` left out, looks like
a program's: only a token tells them apart.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from grpo_core.security.refusal import App, Receive, Scope, Send, refuse

PROBE_PATHS = frozenset({"/health", "/healthz", "/readyz", "/metrics", "/ping"})
"""Open under every name of the server."""
_OWN = ("same-origin", "none")
_PRIVATE_SUFFIXES = (".localhost", ".svc", ".local", ".internal")
"""Of names that nobody can register, `.cluster.local` among them."""
_ELSEWHERE = (
    "this is a request of a web page elsewhere, which this server refuses: Sec-Fetch-Site, Origin "
    "or Referer say so. In a browser, open the server itself; programs send none of them"
)


class SameSiteOnly:
    """403 for requests of other sites' pages, before any of the body is read.

    Args:
        allowed: origins, as browsers write them, whose pages may ask.
        hosts: names of this server that others could have pointed at it.
    """

    def __init__(
        self, app: App, allowed: Collection[str] = (), hosts: Collection[str] = ()
    ) -> None:
        self._app = app
        self._allowed = allowed
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = self._why_not(scope) if scope["type"] in ("http", "websocket") else None
        if reason is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # before it is accepted: 403
        else:
            await refuse(send, 403, reason)

    def _why_not(self, scope: Scope) -> str | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")  # HTTP/1.0 has none, and browsers do not speak it
        name = _name(host)
        if host and scope["path"] not in PROBE_PATHS and not self._is_ours(name):
            return (
                f"the request names the host {name!r}, which others could have pointed at this "
                "server; start it with --allowed-hosts naming it, or ask by address"
            )
        return None if self._is_own_page(headers, host) else _ELSEWHERE

    def _is_ours(self, name: str) -> bool:
        return (
            _is_address(name)
            or "." not in name
            or name.endswith(_PRIVATE_SUFFIXES)
            or name in self._hosts
            or name in _names_of_this_machine()
        )

    def _is_own_page(self, headers: dict[bytes, str], host: str) -> bool:
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if origin is not None and origin in self._allowed:
            return True
        if site is not None:
            return site in _OWN
        page = headers.get(b"referer") if origin is None else origin
        return page is None or _place(page) == host.lower()


def _name(host: str) -> str:
    """`[::1]:8000` → `::1`, `Example.org.:8000` → `example.org`"""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().removesuffix(".")


def _place(url: str) -> str:
    """Host and port as the `Host` header has them; nothing where it is no URL."""
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@functools.cache  # the resolver may take seconds
def _names_of_this_machine() -> frozenset[str]:
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})


def listed(names: str) -> list[str]:
    """`a.example, b.example` → both."""
    return [name.strip() for name in names.split(",") if name.strip()]
