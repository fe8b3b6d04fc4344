"""Checks `Authorization: Bearer` (RFC 6750): run-api's token, the inference server's key."""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection

from pydantic import SecretStr

from grpo_core.security.refusal import App, Receive, Scope, Send, refuse

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
            or _carries(scope, self._token)
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


def _carries(scope: Scope, token: bytes) -> bool:
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) != 1:
        return False
    scheme, _, value = given[0].partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(value.strip(), token)
