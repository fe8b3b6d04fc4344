"""Where inference servers are: URLs, and the addresses of their names."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import httpx

from grpo_core.listening import LOOPBACK, address_of
from grpo_core.service_url import ServiceUrl

_PORTS = {"http": 80, "https": 443}

Lookup = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a name and a port; empty if it has none now."""


@dataclass(frozen=True)
class Place:
    """One server. `address`: that of the server, if the URL's name has several; else ""."""

    url: str
    address: str = ""

    def __str__(self) -> str:
        return f"{self.url} at {self.address}" if self.address else self.url

    @cached_property
    def key(self) -> str:
        """Equal for URLs that lead to the same server, as far as URLs tell."""
        if not self.address:
            return place_key(self.url)
        return place_key(str(httpx.URL(self.url).copy_with(host=self.address)))


@lru_cache(maxsize=4096)
def place_key(url: str) -> str:
    """With and without /v1, and with either name of the loopback address, a URL has one key."""
    parsed = httpx.URL(url.rstrip("/").removesuffix("/v1"))
    host = LOOPBACK if parsed.host == "localhost" else parsed.host
    port = parsed.port or _PORTS.get(parsed.scheme)
    return f"{parsed.scheme}://{host}:{port}{parsed.path.rstrip('/')}"


async def addresses_of(name: str, port: int) -> Sequence[str]:
    """Of one family, because a server has an address in each."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = [(family, str(address[0])) for family, *_, address in found]
    chosen = [a for family, a in addresses if family == socket.AF_INET]
    return sorted({*(chosen or (a for _, a in addresses))})


class NamedServers:
    """The servers of `--inference-url`. A name with several addresses, such as that of a headless
    service, names as many servers.

    Args:
        urls: with or without a trailing /v1
        lookup: of the addresses of a name
    """

    def __init__(self, urls: Sequence[str], lookup: Lookup = addresses_of) -> None:
        self._places = {url: [Place(url)] for url in map(ServiceUrl, urls)}
        self._lookup = lookup

    @property
    def places(self) -> list[Place]:
        """Those of the newest `look_up`."""
        return [place for places in self._places.values() for place in places]

    async def look_up(self) -> None:
        """Find the addresses of all names. A name without an address keeps the previous ones."""
        for url in self._places:
            parsed = httpx.URL(url)
            if parsed.host == "localhost" or address_of(parsed.host):
                continue
            port = parsed.port or _PORTS[parsed.scheme]
            addresses = await self._lookup(parsed.host, port)
            if len(addresses) > 1:
                self._places[url] = [Place(url, address) for address in addresses]
            elif addresses:
                self._places[url] = [Place(url)]
