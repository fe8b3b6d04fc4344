"""Messages between the supervisor, its fork server and its engine.

Between supervisor and fork server, over a SOCK_SEQPACKET pair:

- supervisor → fork server: an `EnginePlan` and its file descriptors
- fork server → supervisor: the start and end of each engine

Between engine and supervisor, over the *channel*, a pair of stream sockets (`EngineEnd`,
`SupervisorEnd`): messages of one byte, of which PARKED comes with the descriptor of a client's
connection; see `grpo_vllm.http_server`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, Field

from grpo_core.weights.ref import WeightRef

_PLAN_BYTES = 1024 * 1024
_FACT = struct.Struct("i")
_DESCRIPTORS_PER_PACKET = 200
"""File descriptors that one packet may carry; the kernel's limit is 253."""
SERVING, PARKED, DROPPED = b"s", b"p", b"d"


class EnginePlan(BaseModel, frozen=True, extra="forbid"):
    """The weights that an engine must serve, and the file descriptors that it gets.

    `channel`: a stream socket to the supervisor (`EngineEnd`); `public`, `control`, `private`:
    listening sockets; `parked`: clients' connections. The numbers are valid in the process that
    holds the plan.
    """

    channel: int
    public: int
    control: int | None = None
    private: int
    parked: tuple[int, ...] = ()
    weights: WeightRef = Field(default_factory=WeightRef)

    def descriptors(self) -> tuple[int, ...]:
        """All descriptors of the plan, in a fixed order."""
        control = () if self.control is None else (self.control,)
        return (self.channel, self.public, self.private, *control, *self.parked)

    def renumbered(self, numbers: Sequence[int]) -> EnginePlan:
        """The same plan with other numbers for `descriptors()`, given in the same order."""
        rest = iter(numbers)
        return self.model_copy(
            update={
                "channel": next(rest),
                "public": next(rest),
                "private": next(rest),
                "control": None if self.control is None else next(rest),
                "parked": tuple(rest),
            }
        )


def send_plan(fork_server: socket.socket, plan: EnginePlan) -> None:
    """Raises `OSError` if the fork server has ended."""
    fork_server.send(plan.model_dump_json().encode())
    descriptors = plan.descriptors()
    for begin in range(0, len(descriptors), _DESCRIPTORS_PER_PACKET):
        some = descriptors[begin : begin + _DESCRIPTORS_PER_PACKET]
        socket.send_fds(fork_server, [b"\0"], list(some))


def receive_plan(supervisor: socket.socket) -> EnginePlan | None:
    """The next plan, with descriptors of this process. None if the supervisor closed the socket."""
    message = supervisor.recv(_PLAN_BYTES)
    if not message:
        return None
    plan = EnginePlan.model_validate_json(message)
    ours: list[int] = []
    while len(ours) < len(plan.descriptors()):
        message, received, _, _ = socket.recv_fds(supervisor, 1, _DESCRIPTORS_PER_PACKET)
        if not message:
            return None
        ours += received
    return plan.renumbered(ours)


def send_fact(supervisor: socket.socket, number: int, pidfd: int | None = None) -> None:
    """Report an engine's start (its process id and a pidfd) or its end (its exit code; a negative
    code is the signal that ended it)."""
    descriptors = [] if pidfd is None else [pidfd]
    socket.send_fds(supervisor, [_FACT.pack(number)], descriptors)


def receive_fact(fork_server: socket.socket) -> tuple[int, int | None] | None:
    """(number, pidfd) as sent; None if the fork server has ended. Raises `BlockingIOError`."""
    try:
        message, descriptors, _, _ = socket.recv_fds(fork_server, _FACT.size, 1)
    except ConnectionResetError:
        return None
    if not message:
        return None
    (number,) = _FACT.unpack(message)
    return number, next(iter(descriptors), None)


class EngineEnd:
    """The engine's end of the channel to the supervisor."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)

    def serving(self) -> None:
        """Report that the engine answers requests now, also on connections that it adopted."""
        self._socket.send(SERVING)

    def park(self, descriptor: int) -> None:
        socket.send_fds(self._socket, [PARKED], [descriptor])

    def dropped(self) -> None:
        """Report a request that was dropped at the end of a drain."""
        self._socket.send(DROPPED)


@dataclass
class SupervisorEnd:
    """The supervisor's end of the channel to one engine after another. Needs a running event loop.

    `parked`: descriptors of the client connections that an engine has handed over; `dropped`: the
    requests that all engines dropped at the end of a drain.
    """

    parked: list[int] = field(default_factory=list)
    dropped: int = 0
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    _socket: socket.socket | None = None

    def open(self) -> socket.socket:
        """Create a new socket pair; returns the engine's end, which is inheritable."""
        self.close()
        self.serving = asyncio.Event()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._read)
        return theirs

    def close(self) -> None:
        """Read the messages that the engine sent before it ended, then close."""
        while self._socket is not None and self._read():
            pass
        self._forget()

    def take_parked(self) -> list[int]:
        """Return all parked descriptors. The caller closes them."""
        taken, self.parked = self.parked, []
        return taken

    def release_parked(self) -> None:
        """Close the parked descriptors, which were copies in case the engine failed to start."""
        for descriptor in self.take_parked():
            os.close(descriptor)

    def _read(self) -> bool:
        """Read one message. False if there is none."""
        assert self._socket is not None
        try:
            # One byte at a time, because a descriptor arrives together with its byte.
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
