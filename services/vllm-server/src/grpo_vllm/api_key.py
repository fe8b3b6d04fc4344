"""The key that vLLM asks for on its own routes (`--api-key`, VLLM_API_KEY), asked for on ours."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/load", "/version", "/healthz", "/readyz"})
"""For probes and monitors, as vLLM leaves them."""


class ApiKeyGuard:
    """401 without `Authorization: Bearer <one of the keys>`, before any of the body is read.

    Args: keys: none lets everything through.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._lets_through(scope):
            await self._app(scope, receive, send)
            return
        answer = JSONResponse(
            {"detail": "this server takes requests with Authorization: Bearer <its API key> only"},
            status_code=401,
            headers={"WWW-Authenticate": "Bearer"},
        )
        await answer(scope, receive, send)

    def _lets_through(self, scope: Scope) -> bool:
        if not self._keys or scope["type"] != "http":  # vLLM looks at websockets
            return True
        # A browser asks with OPTIONS, and without the key, whether it may ask.
        return scope["method"] == "OPTIONS" or scope["path"] in OPEN_PATHS or self._knows(scope)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(given.encode(), key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)
