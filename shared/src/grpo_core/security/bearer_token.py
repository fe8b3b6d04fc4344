"""Tokens of run-api and keys of the inference server: `Authorization: Bearer` (RFC 6750)."""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection

from pydantic import SecretStr

from grpo_core.security.refusal import App, Receive, Scope, Send, refuse

_VISIBLE_ASCII = re.compile(r"[!-~]+")


class BearerTokenGuard:
    """401 without `Authorization: Bearer <token>`, before any of the body is read.

    Websockets pass: run-api has none, and vLLM checks its own.

    Args:
        token: None lets every request through.
        open_paths: answered without the token, for probes and monitors.
        open_methods: likewise.
        credential: its name in the answer.
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
            or _carries(scope, self._token)
        ):
            await self._app(scope, receive, send)
            return
        detail = (
            f"this server takes requests with Authorization: Bearer <its {self._credential}> only"
        )
        await refuse(send, 401, detail, {b"www-authenticate": b"Bearer"})


def usable_token(value: SecretStr | None) -> SecretStr | None:
    """For a settings' validator: raises ValueError for what no header can carry, such as the line
    end of a file that a token was read from."""
    if value is not None and not _VISIBLE_ASCII.fullmatch(value.get_secret_value()):
        raise ValueError(
            "a token is visible ASCII characters, without spaces or line ends, and not empty; "
            "leave it unset to do without one"
        )
    return value


def plain(token: SecretStr | None) -> str | None:
    return None if token is None else token.get_secret_value()


def authorization(token: str | None) -> dict[str, str]:
    """The header of a request."""
    return {} if token is None else {"authorization": f"Bearer {token}"}


def _carries(scope: Scope, token: bytes) -> bool:
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) != 1:
        return False
    scheme, _, value = given[0].partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(value.strip(), token)
