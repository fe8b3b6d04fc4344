"""Sends the shared memory from the inference server to the trainer, over a unix socket.

The server sends one frame: a length of 4 bytes (big endian), then that many bytes of JSON. The JSON
is a `WeightGrant`, or a `WeightRefusal` with the reason. A file descriptor is sent as ancillary
data of the length (SCM_RIGHTS, unix(7)). The connection then stays open as long as the trainer
lives.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from grpo_core.closing import ClosesOnExit
from grpo_core.errors import GrpoError, ProtocolViolation, ServiceUnavailable, parsing
from grpo_core.weights.shared_memory import MemfdMemory, WeightGrant, WeightRefusal

_ANSWER: TypeAdapter[WeightGrant | WeightRefusal] = TypeAdapter(WeightGrant | WeightRefusal)
_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("iII")
"""pid, uid, gid: unix(7)"""
_MAX_GRANT_BYTES = 64 * 1024 * 1024
_CONNECT_TIMEOUT_S = 10.0


def send_grant(connection: socket.socket, grant: WeightGrant, fd: int | None = None) -> None:
    """Send the grant over a connected unix socket, with the memory's descriptor if it has one."""
    payload = grant.model_dump_json().encode()
    socket.send_fds(connection, [_LENGTH.pack(len(payload))], [] if fd is None else [fd])
    connection.sendall(payload)


def send_refusal(connection: socket.socket, reason: str) -> None:
    """Send the reason why a trainer may not attach."""
    payload = WeightRefusal(refused=reason).model_dump_json().encode()
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


@dataclass
class WeightConnection(ClosesOnExit):
    """The trainer's end: a non-blocking connection, the grant, and the memory's file descriptor.

    The descriptor is -1 if the memory has none.
    """

    connection: socket.socket
    fd: int
    grant: WeightGrant

    def server_has_closed(self) -> bool:
        """Whether the server closed the connection. It then no longer uses this memory."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.connection.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def connect_weights(path: Path) -> WeightConnection:
    """Connect to a server's weight socket and receive the shared memory.

    Raises:
        ServiceUnavailable: no process listens at `path`, the server is ending, or it refused; the
            message contains the reason.
        ProtocolViolation: the listener belongs to another user, or is not an inference server.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_CONNECT_TIMEOUT_S)
    try:
        connection.connect(str(path))
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _pid, uid, _gid = _CREDENTIALS.unpack(peer)
        if uid != os.getuid():
            raise ProtocolViolation(
                f"weight socket {path}: the server runs as user {uid}, the trainer as "
                f"{os.getuid()}; run both as the same user, or find out which process created that "
                "socket"
            )
        fd, grant = _receive_grant(connection)
    except OSError as error:
        connection.close()
        raise ServiceUnavailable(
            f"weight socket {path}: {error}; start vllm-api-server with --share-weights on this "
            "host, and give the server and the trainer the same --weights-socket"
        ) from error
    except GrpoError:
        connection.close()
        raise
    connection.setblocking(False)
    return WeightConnection(connection, fd, grant)


def _receive_grant(connection: socket.socket) -> tuple[int, WeightGrant]:
    header, fds, _flags, _address = socket.recv_fds(connection, _LENGTH.size, 1)
    try:
        if not header:
            raise _closed_early()
        if len(header) != _LENGTH.size:
            raise ProtocolViolation(
                f"weight socket: received {len(header)} bytes; is it the socket of vllm-api-server?"
            )
        payload = _receive_exactly(connection, _LENGTH.unpack(header)[0])
        with parsing("weight socket: the server's answer is invalid"):
            answer = _ANSWER.validate_json(payload)
        if isinstance(answer, WeightRefusal):
            raise ServiceUnavailable(
                f"weight socket: the server refused the trainer: {answer.refused}"
            )
        has_descriptor = isinstance(answer.memory, MemfdMemory)
        if has_descriptor != bool(fds):
            raise ProtocolViolation(
                f"weight socket: the server sent {len(fds)} file descriptors instead of "
                f"{int(has_descriptor)} for shared memory of type {answer.memory.kind!r}"
            )
        return (fds[0] if fds else -1), answer
    except (GrpoError, OSError):
        for fd in fds:
            os.close(fd)
        raise


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    if size > _MAX_GRANT_BYTES:
        raise ProtocolViolation(
            f"weight socket: the answer of {size} bytes is above the limit of {_MAX_GRANT_BYTES}"
        )
    received = bytearray()
    while len(received) < size:
        chunk = connection.recv(size - len(received))
        if not chunk:
            raise _closed_early()
        received += chunk
    return bytes(received)


def _closed_early() -> ServiceUnavailable:
    return ServiceUnavailable(
        "weight socket: the connection closed because the server is ending; see the server's log"
    )
