"""Sends httpx's asynchronous requests with aiohttp, which needs a fifth of the CPU time.

Environments share the machine with the inference server and send several requests per group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import httpx


class AiohttpTransport(httpx.AsyncBaseTransport):
    """Reads each answer whole. Proxies come from the environment, as with httpx's own transport.

    Args:
        max_connections: limit on concurrent requests; further ones wait without a limit
    """

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None  # needs a running event loop

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        limits = request.extensions["timeout"]
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=limits["connect"], sock_read=limits["read"]
        )
        with _errors_of_httpx():
            async with self._open_session().request(
                request.method,
                str(request.url),
                headers=request.headers.multi_items(),
                data=request.content or None,
                allow_redirects=False,
                timeout=timeout,
            ) as answer:
                content = await answer.read()
        return httpx.Response(
            answer.status,
            headers=answer.raw_headers,
            stream=httpx.ByteStream(content),
            request=request,
        )

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=self._max_connections, ssl=httpx.create_ssl_context()
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # httpx does
                trust_env=True,
            )
        return self._session


@contextmanager
def _errors_of_httpx() -> Iterator[None]:
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise httpx.ConnectTimeout(str(error)) from error
    except aiohttp.SocketTimeoutError as error:
        raise httpx.ReadTimeout(str(error)) from error
    except aiohttp.ClientConnectorError as error:
        raise httpx.ConnectError(str(error)) from error
    except aiohttp.ClientError as error:  # the request may have been carried out
        raise httpx.ReadError(str(error)) from error
