"""Messages between the supervisor and the fork server, over a SOCK_SEQPACKET pair.

- supervisor → fork server: an `EnginePlan` and its file descriptors
- fork server → supervisor: the start and end of each engine

The engine itself reports to the supervisor over a `grpo_vllm.http.connection_handover` channel.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from grpo_core.weights.ref import WeightRef

_PLAN_BYTES = 1024 * 1024
_FACT = struct.Struct("i")
_DESCRIPTORS_PER_PACKET = 200
"""File descriptors that one packet may carry; the kernel's limit is 253."""


class EnginePlan(BaseModel):
    """The weights that an engine must serve, and the file descriptors that it gets.

    `channel`: a stream socket to the supervisor (`EngineEnd`); `public`, `control`, `private`:
    listening sockets; `parked`: clients' connections. The numbers are valid in the process that
    holds the plan.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

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
