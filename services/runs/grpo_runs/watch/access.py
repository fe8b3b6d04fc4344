"""Lets only those in who know the token. A browser shows it once in the address, and gets it back
as a cookie."""

from __future__ import annotations

import hmac
from urllib.parse import parse_qs, quote, urlencode

from pydantic import SecretStr
from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse

from grpo_core.security import App, Receive, Scope, Send, carries, plain, refuse

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
        self._token = plain(token) or ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._token or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if self._is_token((query.pop(PARAMETER, [""]))[0]):
            await self._welcome(scope, query)(scope, receive, send)
            return
        await refuse(
            send,
            401,
            "missing or wrong token; open the address that grpo-watch printed, which ends in "
            "?token=…, or send Authorization: Bearer <token>",
        )

    def _is_known(self, scope: Scope) -> bool:
        cookie = HTTPConnection(scope).cookies.get(_name_of_cookie(scope), "")
        return carries(scope, self._token.encode()) or self._is_token(cookie)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _welcome(self, scope: Scope, query: dict[str, list[str]]) -> RedirectResponse:
        # One slash at the beginning of the path: two would be a host.
        path, rest = "/" + quote(scope["path"].lstrip("/")), urlencode(query, doseq=True)
        response = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
        response.headers["referrer-policy"] = "no-referrer"
        name = _name_of_cookie(scope)
        response.set_cookie(name, self._token, httponly=True, samesite="strict")
        return response


def _name_of_cookie(scope: Scope) -> str:
    return COOKIE.format(port=scope["server"][1])
