"""Lets only those in who know the token. A browser shows it once in the address, and gets it back
as a cookie."""

from __future__ import annotations

import hmac
from urllib.parse import parse_qs, quote, urlencode

from pydantic import SecretStr
from starlette.requests import HTTPConnection

from grpo_core.security import App, Receive, Scope, Send, carries, refuse

COOKIE = "grpo-watch-{port}"
"""Browsers send the cookies of a host to each of its ports."""
PARAMETER = "token"


class TokenCookie:
    """Answers 401 to requests with neither the cookie nor `Authorization: Bearer <token>`. A
    request with `?token=` gets the cookie, and is sent to the same address without it.

    Args: token: None lets everybody in
    """

    def __init__(self, app: App, token: SecretStr | None) -> None:
        self._app = app
        self._token = None if token is None else token.get_secret_value()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._token is None or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if self._is_token((query.pop(PARAMETER, [""]))[0]):
            await self._welcome(scope, query, send)
            return
        await refuse(
            send,
            401,
            "missing or wrong token; open the address that grpo-watch printed, which ends in "
            "?token=…, or send Authorization: Bearer <token>",
        )

    def _is_known(self, scope: Scope) -> bool:
        assert self._token is not None
        cookie = HTTPConnection(scope).cookies.get(_name_of_cookie(scope), "")
        return carries(scope, self._token.encode()) or self._is_token(cookie)

    def _is_token(self, given: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(given.encode(), self._token.encode())

    async def _welcome(self, scope: Scope, query: dict[str, list[str]], send: Send) -> None:
        rest = urlencode(query, doseq=True)
        cookie = f"{_name_of_cookie(scope)}={self._token}; Path=/; HttpOnly; SameSite=Strict"
        # The path as a browser sends it, and one slash at its beginning: two would be a host.
        path = "/" + quote(scope["path"].lstrip("/"))
        headers = [
            (b"location", (path + (f"?{rest}" if rest else "")).encode()),
            (b"set-cookie", cookie.encode()),
            (b"referrer-policy", b"no-referrer"),
        ]
        await send({"type": "http.response.start", "status": 303, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


def _name_of_cookie(scope: Scope) -> str:
    return COOKIE.format(port=scope["server"][1])
