"""A TCP relay that delays, slows or damages what it passes on."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_CHUNK = 4096


def _as_it_is(data: bytes) -> bytes:
    return data


@dataclass(frozen=True)
class Damage:
    """Args:
    delay_s: of every chunk of up to 4 KiB, in both directions
    bytes_per_s: limit on what the server's side sends
    answer: applied to the bytes of the server
    request: applied to the bytes of the client
    """

    delay_s: float = 0.0
    bytes_per_s: float = float("inf")
    answer: Callable[[bytes], bytes] = _as_it_is
    request: Callable[[bytes], bytes] = _as_it_is


@contextmanager
def relay(port: int, damage: Damage, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Relay connections to 127.0.0.1:`port`, those of clients with TLS; yields its own port."""
    loop = asyncio.new_event_loop()
    open_now: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            back, forth = await asyncio.open_connection("127.0.0.1", port)
            open_now.update((writer, forth))
            await asyncio.gather(
                _pump(reader, forth, damage.delay_s, float("inf"), damage.request),
                _pump(back, writer, damage.delay_s, damage.bytes_per_s, damage.answer),
            )

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls))
    thread = threading.Thread(target=loop.run_forever, name="relay")
    thread.start()

    async def end() -> None:
        server.close()
        for writer in open_now:
            writer.transport.abort()
        serving = asyncio.all_tasks() - {asyncio.current_task()}
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        loop.stop()

    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop)
        thread.join()
        loop.close()


async def _pump(
    source: asyncio.StreamReader,
    target: asyncio.StreamWriter,
    delay_s: float,
    bytes_per_s: float,
    change: Callable[[bytes], bytes],
) -> None:
    with suppress(OSError):
        while data := await source.read(_CHUNK):
            await asyncio.sleep(delay_s + len(data) / bytes_per_s)
            target.write(change(data))
            await target.drain()
    with suppress(OSError):
        target.close()
