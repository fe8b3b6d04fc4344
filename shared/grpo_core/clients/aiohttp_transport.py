"""Sends httpx's asynchronous requests with aiohttp, which needs a third of the CPU time.

Environments share the machine with the inference server and send several requests per group.
"""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import aiohttp
import httpx

from grpo_core.sockets import make_socket, proxy_for


class AiohttpTransport(httpx.AsyncBaseTransport):
    """Reads each answer whole. The time limits are httpx's, but writing has none of its own: an
    answer must begin within the sum of those of connecting, writing and reading.

    Args:
        base_url: decides whether requests go through a proxy of the environment
        max_connections: limit on concurrent requests; further ones wait without a limit
        address: the one to connect to, of several of the URL's name; "" for any
    """

    def __init__(self, base_url: str, max_connections: int, address: str = "") -> None:
        self._proxy = proxy_for(base_url)
        self._address = "" if self._proxy else address
        self._free = asyncio.Semaphore(max_connections)
        self._session: aiohttp.ClientSession | None = None  # needs a running event loop

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        limits = request.extensions["timeout"]
        # The header `host`, and the name in the certificate, stay those of the URL.
        url = request.url.copy_with(host=self._address) if self._address else request.url
        with _errors_of_httpx(request):
            async with self._free:
                # aiohttp itself would wait forever for a server that does not read.
                async with asyncio.timeout(limits["connect"] + limits["write"] + limits["read"]):
                    answer = await self._open_session().request(
                        request.method,
                        str(url),
                        headers=request.headers.multi_items(),
                        data=io.BytesIO(request.content) if request.content else None,
                        allow_redirects=False,
                        proxy=self._proxy,
                        server_hostname=request.url.host,
                        timeout=aiohttp.ClientTimeout(
                            total=None, sock_connect=limits["connect"], sock_read=limits["read"]
                        ),
                    )
                async with answer:
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
                connector=aiohttp.TCPConnector(limit=0, ssl=_tls(), socket_factory=make_socket),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # httpx does
            )
        return self._session


@cache
def _tls() -> ssl.SSLContext:
    """As httpx makes it, but one for all clients: it takes 50 ms, and each server has two."""
    return httpx.create_ssl_context()


@contextmanager
def _errors_of_httpx(request: httpx.Request) -> Iterator[None]:
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise httpx.ConnectTimeout(str(error), request=request) from error
    except aiohttp.ClientConnectorError as error:
        raise httpx.ConnectError(str(error.os_error), request=request) from error
    except TimeoutError as error:
        raise httpx.ReadTimeout(str(error), request=request) from error
    except aiohttp.ClientError as error:  # the request may have been carried out
        raise httpx.ReadError(str(error), request=request) from error
