"""Inside a sandbox: serves a Unix socket at a loopback address, then becomes the program.

`python relay.py SOCKET COMMAND...`. It imports nothing but the standard library, because it is
mounted into sandboxes that have no other package.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

PORT = 8100
URL = f"http://127.0.0.1:{PORT}"
_CHUNK_BYTES = 2**16


async def serve(listener: socket.socket, path: str) -> None:
    """Join each connection to one of the Unix socket, for ever."""

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(path)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        for one in (writer, far_writer):
            one.close()

    server = await asyncio.start_server(join, sock=listener)
    await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()
    except OSError:  # the other side has gone
        writer.close()


def main() -> None:
    path, command = sys.argv[1], sys.argv[2:]
    listener = socket.create_server(("127.0.0.1", PORT))
    if os.fork():
        listener.close()
        os.execvp(command[0], command)
    for number in (0, 1, 2):  # their readers wait for the end of the program
        os.close(number)
    asyncio.run(serve(listener, path))


if __name__ == "__main__":
    main()
