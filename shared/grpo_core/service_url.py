"""URLs of services: what is shown or stored of them holds no password."""

from __future__ import annotations

import re
from base64 import b64encode
from urllib.parse import unquote, urlsplit, urlunsplit

_USERINFO = re.compile(r"(\w+://)\S+@")  # up to the last one: a password may hold / or @


def hide_passwords(text: str) -> str:
    """`redis://user:X@host` → `redis://***@host`"""
    return _USERINFO.sub(r"\1***@", text)


class ServiceUrl(str):
    """An HTTP URL without the user and password that it was written with, so that no log, label,
    file or error message shows them. Only clients ask for them.

        ServiceUrl("http://me:pass@host:8000")    # is "http://host:8000"
    """

    userinfo: str
    """`me:pass`, percent-encoded; empty if the URL has none."""

    def __new__(cls, url: str) -> ServiceUrl:
        parts = urlsplit(url)
        userinfo, _, place = parts.netloc.rpartition("@")
        text = urlunsplit(parts._replace(netloc=place)) if userinfo else str(url)
        made = super().__new__(cls, text)
        made.userinfo = url.userinfo if isinstance(url, ServiceUrl) else userinfo
        return made

    @property
    def root(self) -> ServiceUrl:
        """Without the `/v1` that OpenAI clients write at its end."""
        found = ServiceUrl(self.rstrip("/").removesuffix("/v1"))
        found.userinfo = self.userinfo
        return found

    @property
    def with_userinfo(self) -> str:
        """As it was written, to pass it on in secret."""
        return self.replace("://", f"://{self.userinfo}@", 1) if self.userinfo else str(self)

    def authorization(self) -> dict[str, str]:
        """The request header for user and password (RFC 7617); empty without them."""
        if not self.userinfo:
            return {}
        user, _, password = self.userinfo.partition(":")
        credentials = f"{unquote(user)}:{unquote(password)}".encode()
        return {"authorization": f"Basic {b64encode(credentials).decode()}"}
