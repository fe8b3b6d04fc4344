"""What the supervisor and the engine host tell each other, over a SOCK_SEQPACKET pair."""

from __future__ import annotations

import socket

from pydantic import BaseModel, ConfigDict

from grpo_vllm.forkserver.engine_plan import EnginePlan

_PLAN_BYTES = 1024 * 1024
_FACT_BYTES = 1024
_DESCRIPTORS_PER_PACKET = 200
"""The kernel takes 253."""


class Forked(BaseModel):
    """An engine process was started; a pidfd of it comes with this packet."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int


class Ended(BaseModel):
    """It has ended and was reaped. `exit_code`: negative is the signal that ended it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    exit_code: int


def send_plan(host: socket.socket, plan: EnginePlan) -> None:
    """Raises OSError where the host is gone."""
    host.send(plan.model_dump_json().encode())
    descriptors = plan.descriptors()
    for begin in range(0, len(descriptors), _DESCRIPTORS_PER_PACKET):
        some = descriptors[begin : begin + _DESCRIPTORS_PER_PACKET]
        socket.send_fds(host, [b"\0"], list(some))


def receive_plan(supervisor: socket.socket) -> EnginePlan | None:
    """The next plan, with this process's numbers of its descriptors. None: there will be none."""
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


def send_fact(supervisor: socket.socket, fact: Forked | Ended, pidfd: int | None = None) -> None:
    descriptors = [] if pidfd is None else [pidfd]
    socket.send_fds(supervisor, [fact.model_dump_json().encode()], descriptors)


def receive_fact(host: socket.socket) -> tuple[Forked | Ended | None, int | None]:
    """(what happened, pidfd); None where the host has ended. Raises BlockingIOError."""
    try:
        message, descriptors, _, _ = socket.recv_fds(host, _FACT_BYTES, 1)
    except ConnectionResetError:
        return None, None
    if not message:
        return None, None
    if descriptors:
        return Forked.model_validate_json(message), descriptors[0]
    return Ended.model_validate_json(message), None
