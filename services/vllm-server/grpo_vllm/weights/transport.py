"""Reads files of versions from other hosts."""

from __future__ import annotations

from typing import Protocol

import httpx
from pydantic import SecretStr

from grpo_core.closing import ClosesOnAsyncExit
from grpo_core.errors import GrpoError
from grpo_core.security import plain

CHUNK_DEADLINE_S = 30.0


class SourceFailed(GrpoError):
    """A source did not send what was asked of it."""


class Transport(Protocol):
    """Reads files of other hosts."""

    async def read(self, url: str, first: int = 0, size: int | None = None) -> bytes:
        """`size` bytes from byte `first` on, or the whole file. Raises `SourceFailed`."""
        ...


class HttpTransport(ClosesOnAsyncExit):
    """Ranges of files by HTTP, never through a proxy: the trainer and the servers of a run name the
    addresses, and no user chose a proxy for them. Args: api_key: sent as a bearer token"""

    def __init__(self, api_key: SecretStr | None) -> None:
        key = plain(api_key)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(headers=headers, timeout=CHUNK_DEADLINE_S, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def read(self, url: str, first: int = 0, size: int | None = None) -> bytes:
        """As `Transport.read`."""
        span = {} if size is None else {"Range": f"bytes={first}-{first + size - 1}"}
        try:
            answer = await self._http.get(url, headers=span)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise SourceFailed(f"GET {url}: {str(error) or type(error).__name__}") from error
        if answer.status_code != (200 if size is None else 206):
            raise SourceFailed(f"GET {url}: status {answer.status_code}")
        return answer.content
