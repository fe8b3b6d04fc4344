"""Hands the weight memory from the inference server to the trainer: one JSON record.

Frame: 4 bytes length (big endian), then that many bytes of JSON: a `WeightGrant`, or a
`WeightRefusal` that says why there is none. Memory that is a file descriptor comes as ancillary
data of the length (SCM_RIGHTS, unix(7)). Nothing else is ever sent; the open connection itself is
the sign that the trainer lives.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from grpo_core.errors import GrpoError, ProtocolViolation, ServiceUnavailable
from grpo_core.process.closing import ClosesOnExit
from grpo_core.weights.memory_grant import MemfdMemory, WeightGrant, WeightRefusal

_ANSWER: TypeAdapter[WeightGrant | WeightRefusal] = TypeAdapter(WeightGrant | WeightRefusal)
_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("iII")
"""pid, uid, gid: unix(7)"""
_MAX_GRANT_BYTES = 64 * 1024 * 1024
_CONNECT_TIMEOUT_S = 10.0


def send_grant(connection: socket.socket, grant: WeightGrant, fd: int | None = None) -> None:
    """Send the grant, with the descriptor of the weight memory where it has one, over a connected
    unix socket."""
    payload = grant.model_dump_json().encode()
    socket.send_fds(connection, [_LENGTH.pack(len(payload))], [] if fd is None else [fd])
    connection.sendall(payload)


def send_refusal(connection: socket.socket, reason: str) -> None:
    """Tell a trainer at the door why it gets nothing."""
    payload = WeightRefusal(refused=reason).model_dump_json().encode()
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


@dataclass
class WeightConnection(ClosesOnExit):
    """The trainer's end: an open non-blocking connection, the grant, and the memory's descriptor
    (-1 for memory that has none)."""

    connection: socket.socket
    fd: int
    grant: WeightGrant

    def server_has_closed(self) -> bool:
        """True once the server end is gone: its weights are no longer the ones in our memory."""
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
    """Connect to a server's weight socket and receive its memory.

    Raises:
        ServiceUnavailable: nothing listens at `path`, the server ends at this moment, or it
            refuses; the reason is in the message.
        ProtocolViolation: what listens there is another user's, or speaks something else.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_CONNECT_TIMEOUT_S)
    try:
        connection.connect(str(path))
        _require_own(connection, path)
        fd, grant = _receive_grant(connection)
    except OSError as error:
        connection.close()
        raise ServiceUnavailable(
            f"weight socket {path}: {error}; start vllm-api-server with --share-weights on this "
            "host and pass the same --weights-socket to both"
        ) from error
    except GrpoError:
        connection.close()
        raise
    connection.setblocking(False)
    return WeightConnection(connection, fd, grant)


def _require_own(connection: socket.socket, path: Path) -> None:
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, uid, _gid = _CREDENTIALS.unpack(peer)
    if uid != os.getuid():
        raise ProtocolViolation(
            f"weight socket {path}: user {uid} listens there, and the trainer's is {os.getuid()}; "
            "run both as one user, or look who put that socket there"
        )


def _receive_grant(connection: socket.socket) -> tuple[int, WeightGrant]:
    header, fds, _flags, _address = socket.recv_fds(connection, _LENGTH.size, 1)
    if not header:
        raise _closed_early()
    if len(header) != _LENGTH.size:
        for fd in fds:
            os.close(fd)
        raise ProtocolViolation(
            f"weight socket: {len(header)} bytes instead of a frame of {_LENGTH.size} and more; is "
            "it the socket of vllm-api-server?"
        )
    try:
        payload = _receive_exactly(connection, _LENGTH.unpack(header)[0])
        return _granted(_ANSWER.validate_json(payload), fds)
    except (GrpoError, ValidationError, OSError) as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, ValidationError):
            raise ProtocolViolation(f"weight socket: {error}") from error
        raise


def _granted(answer: WeightGrant | WeightRefusal, fds: list[int]) -> tuple[int, WeightGrant]:
    if isinstance(answer, WeightRefusal):
        raise ServiceUnavailable(f"weight socket: {answer.refused}")
    if isinstance(answer.memory, MemfdMemory) != bool(fds):
        raise ProtocolViolation(
            f"weight socket: memory of kind {answer.memory.kind} with {len(fds)} descriptors"
        )
    return (fds[0] if fds else -1), answer


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    if size > _MAX_GRANT_BYTES:
        raise ProtocolViolation(f"weight socket: a grant of {size} bytes is not plausible")
    received = bytearray()
    while len(received) < size:
        chunk = connection.recv(size - len(received))
        if not chunk:
            raise _closed_early()
        received += chunk
    return bytes(received)


def _closed_early() -> ServiceUnavailable:
    return ServiceUnavailable(
        "weight socket: closed before the grant was sent; the server is ending. Look at its log"
    )
