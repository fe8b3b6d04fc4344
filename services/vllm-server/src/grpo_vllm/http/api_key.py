"""The key (`--api-key`, VLLM_API_KEY) that vLLM asks for on its own routes, asked for on ours."""

from __future__ import annotations

import hmac

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/load", "/version", "/healthz", "/readyz"})
"""For probes and monitors, as vLLM leaves them."""


class ApiKeyGuard:
    """401 without `Authorization: Bearer <key>`, before any of the body is read.

    Args: key: none lets everything through.
    """

    def __init__(self, app: ASGIApp, key: SecretStr | None) -> None:
        self._app = app
        self._key = None if key is None else key.get_secret_value().encode()

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
        if self._key is None or scope["type"] != "http":  # vLLM looks at websockets
            return True
        # A browser asks with OPTIONS, and without the key, whether it may ask.
        return (
            scope["method"] == "OPTIONS" or scope["path"] in OPEN_PATHS or _given(scope, self._key)
        )


def _given(scope: Scope, key: bytes) -> bool:
    scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), key)
