"""Refuses what a browser sends on behalf of a web page elsewhere. Plain ASGI, for every server.

A browser that can reach a server lets any page that it shows send requests there, and some of ours
change the run by a bare GET. What answers them says nothing to that page, but it need not read the
answer. A page whose host name was pointed at the server (DNS rebinding) reads it as well.

Browsers mark requests to loopback addresses and over TLS with `Sec-Fetch-Site` (W3C Fetch
Metadata), which no page can set or leave out. So a browser's request passes where that says that
the user or a page of the server itself sent it. Without it, over plain HTTP to any other address or
name, a browser's request may be anybody's. Clients that are no browsers send none of the headers
asked for.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_OWN = ("same-origin", "none")
_BROWSER = b"Mozilla/"
"""What the User-Agent of each of them begins with."""
_REFUSAL = json.dumps(
    {
        "detail": "this looks like a request of a web page elsewhere, which this server refuses. "
        "In a browser, open the server as http://localhost or over TLS; programs send neither "
        "Origin nor Sec-Fetch-Site nor a browser's User-Agent"
    }
).encode()


class SameSiteOnly:
    """403 for requests of other sites' pages, before any of the body is read.

    Args:
        allowed: origins, as browsers write them, whose pages may ask.
    """

    def __init__(self, app: App, allowed: Collection[str] = ()) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._is_own(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # before it is accepted: 403
        else:
            headers = [(b"content-type", b"application/json")]
            headers.append((b"content-length", b"%d" % len(_REFUSAL)))
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSAL})

    def _is_own(self, scope: MutableMapping[str, Any]) -> bool:
        headers = dict(scope["headers"])
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if origin is not None and origin.decode("latin-1") in self._allowed:
            return True
        if site is not None:
            return site.decode("latin-1") in _OWN
        return origin is None and not headers.get(b"user-agent", b"").startswith(_BROWSER)
