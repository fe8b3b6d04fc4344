"""ASGI types, and the answer that middleware sends to a rejected request."""

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
    """Answer with `{"detail": ...}`, without reading the request body."""
    body = json.dumps({"detail": detail}).encode()
    fields = {b"content-type": b"application/json", b"content-length": b"%d" % len(body), **headers}
    await send({"type": "http.response.start", "status": status, "headers": list(fields.items())})
    await send({"type": "http.response.body", "body": body})
