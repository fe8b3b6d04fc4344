"""Names of plain ASGI's parts, and one way to answer before the application sees a request."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

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
    """Answer `{"detail": ...}`, before any of the body is read."""
    body = json.dumps({"detail": detail}).encode()
    fields = {b"content-type": b"application/json", b"content-length": b"%d" % len(body), **headers}
    await send({"type": "http.response.start", "status": status, "headers": list(fields.items())})
    await send({"type": "http.response.body", "body": body})
