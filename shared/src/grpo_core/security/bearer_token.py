"""The token that run-api, and the key that the inference server may ask clients for (RFC 6750)."""

from __future__ import annotations

import re

from pydantic import SecretStr

_VISIBLE_ASCII = re.compile(r"[!-~]+")


def usable_token(value: SecretStr | None) -> SecretStr | None:
    """For a settings' validator: raises ValueError for what no header can carry, such as the line
    end of a file that a token was read from."""
    if value is not None and not _VISIBLE_ASCII.fullmatch(value.get_secret_value()):
        raise ValueError("a token is visible ASCII characters, without spaces or line ends")
    return value


def plain(token: SecretStr | None) -> str | None:
    return None if token is None else token.get_secret_value()


def authorization(token: str | None) -> dict[str, str]:
    """The header of a request."""
    return {} if token is None else {"authorization": f"Bearer {token}"}
