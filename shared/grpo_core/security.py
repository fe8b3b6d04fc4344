"""ASGI middleware that rejects requests without a token, or sent for a page of another site.

The token is a bearer token (RFC 6750): that of run-api, or the key of the inference server.

Any page in a browser can send requests to every server that the browser reaches, and some GET
requests change a run. The page cannot read the answer, but it does not need to. With DNS rebinding,
a page's host name points to this server. It can then read answers too, and its requests differ from
same-site requests only in the name in `Host`.

Browsers add `Sec-Fetch-Site` (W3C Fetch Metadata) to requests to loopback addresses and over TLS,
and no page can change that. For other requests, `Origin` or `Referer` may name the page. A GET over
plain HTTP from a page without `Referer` looks like the request of a program. Only a token protects
from those.
"""

from __future__ import annotations

import functools
import hmac
import json
import re
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from grpo_core.listening import address_of

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


async def refuse(
    send: Send,
    status: int,
    detail: str,
    headers: Mapping[bytes, bytes] = MappingProxyType({}),
) -> None:
    """Answer with `{"detail": ...}`, without reading the request body."""
    body = json.dumps({"detail": detail}).encode()
    fields = {b"content-type": b"application/json", b"content-length": b"%d" % len(body), **headers}
    await send({"type": "http.response.start", "status": status, "headers": list(fields.items())})
    await send({"type": "http.response.body", "body": body})


_VISIBLE_ASCII = re.compile(r"[!-~]+")


class BearerTokenGuard:
    """Answers 401 to requests without `Authorization: Bearer <token>`, without reading the body.

    Websockets are not checked: run-api has none, and vLLM checks its own.

    Args:
        token: None accepts every request.
        open_paths: paths that need no token, for probes and monitoring.
        open_methods: methods that need no token.
        credential: name of the token in the answer.
    """

    def __init__(
        self,
        app: App,
        token: SecretStr | None,
        open_paths: Collection[str],
        open_methods: Collection[str] = (),
        credential: str = "token",
    ) -> None:
        self._app = app
        self._token = None if token is None else token.get_secret_value().encode()
        self._open_paths = open_paths
        self._open_methods = open_methods
        self._credential = credential

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            self._token is None
            or scope["type"] != "http"
            or scope["path"] in self._open_paths
            or scope["method"] in self._open_methods
            or carries(scope, self._token)
        ):
            await self._app(scope, receive, send)
            return
        detail = (
            f"missing or wrong {self._credential}; send Authorization: Bearer <{self._credential}>"
        )
        await refuse(send, 401, detail, {b"www-authenticate": b"Bearer"})


def usable_token(value: SecretStr | None) -> SecretStr | None:
    """Validator of a setting. Raises ValueError for characters that no header can carry.

    An example is the line end of a file that contains the token.
    """
    if value is not None and not _VISIBLE_ASCII.fullmatch(value.get_secret_value()):
        raise ValueError(
            "an access token or API key must be one or more visible ASCII characters, without "
            "spaces or line ends; to use no token or key, omit the option"
        )
    return value


def plain(token: SecretStr | None) -> str | None:
    return None if token is None else token.get_secret_value()


def authorization(token: str | None) -> dict[str, str]:
    """The request header for a token; empty without one."""
    return {} if token is None else {"authorization": f"Bearer {token}"}


def carries(scope: Scope, token: bytes) -> bool:
    """Whether a request has this bearer token."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) != 1:
        return False
    scheme, _, value = given[0].partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(value.strip(), token)


PROBE_PATHS = frozenset({"/health", "/healthz", "/readyz", "/metrics", "/ping"})
"""Paths that are answered for any name in `Host`."""
_OWN = ("same-origin", "none")
_PRIVATE_SUFFIXES = (".localhost", ".svc", ".local", ".internal")
"""Suffixes of names that cannot be registered in public DNS, such as `.cluster.local`."""
_ELSEWHERE = (
    "rejected, because Sec-Fetch-Site, Origin or Referer show that a web page of another site sent "
    "this request; open the server's own address in the browser, or remove these headers"
)


class SameSiteOnly:
    """Answers 403 to requests from pages of other sites, without reading the body.

    Args:
        allowed: other origins whose pages may send requests, in the form of the `Origin` header.
        hosts: public DNS names of this server.
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
        host = headers.get(b"host", "")  # absent in HTTP/1.0, which browsers do not use
        name = _name(host)
        if host and scope["path"] not in PROBE_PATHS and not self._is_ours(name):
            return (
                f"rejected, because the host name {name!r} may belong to another site; add the "
                "host name to --allowed-hosts of this server, or use the server's IP address"
            )
        return None if self._is_own_page(headers, host) else _ELSEWHERE

    def _is_ours(self, name: str) -> bool:
        return (
            address_of(name) is not None
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
    """Host and port in the form of the `Host` header; empty if `url` is not a URL."""
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return ""


@functools.cache  # the resolver may take seconds
def _names_of_this_machine() -> frozenset[str]:
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})


def listed(names: str) -> list[str]:
    """`a.example, b.example` → both."""
    return [name.strip() for name in names.split(",") if name.strip()]


def is_loopback(host: str) -> bool:
    address = address_of(host)
    return host == "localhost" or (address is not None and address.is_loopback)
