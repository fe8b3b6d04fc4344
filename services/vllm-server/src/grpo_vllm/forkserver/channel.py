"""What the engine process tells its supervisor, over one socket: a byte a message, and with
PARKED a descriptor."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass, field

SERVING, PARKED, DROPPED = b"s", b"p", b"d"


class EngineEnd:
    """The engine process's end."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)

    def serving(self) -> None:
        """Requests are answered from now on, on adopted connections too."""
        self._socket.send(SERVING)

    def park(self, descriptor: int) -> None:
        socket.send_fds(self._socket, [PARKED], [descriptor])

    def dropped(self) -> None:
        """A request was given up at the end of a drain."""
        self._socket.send(DROPPED)


@dataclass
class SupervisorEnd:
    """The supervisor's end; `listen` on a running event loop.

    `parked`: descriptors of client connections that the engine process has handed over.
    """

    parked: list[int] = field(default_factory=list)
    dropped: int = 0
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    _socket: socket.socket | None = None

    def open(self) -> socket.socket:
        """A new pair; returns the engine process's end, which is inheritable."""
        self.close()
        self.serving = asyncio.Event()
        self.dropped = 0
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._read)
        return theirs

    def close(self) -> None:
        """Take in what was sent before the engine process ended, then close."""
        if self._socket is None:
            return
        while self._socket is not None and self._read():
            pass
        self._forget()

    def take_parked(self) -> list[int]:
        """All that are parked; the caller closes them."""
        taken, self.parked = self.parked, []
        return taken

    def _read(self) -> bool:
        """One message. False where there is none."""
        assert self._socket is not None
        try:
            # One byte at a time: descriptors come with the byte that they were sent with.
            message, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            message, descriptors = b"", []
        if message == SERVING:
            self.serving.set()
        elif message == DROPPED:
            self.dropped += 1
        self.parked += descriptors
        if not message:
            self._forget()
        return bool(message)

    def _forget(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None


def close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
