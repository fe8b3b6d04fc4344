"""The trainer's end of the weight socket. `test_shared_weights` tests granted memory."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo_core.errors import GrpoError, ProtocolViolation, ServiceUnavailable
from grpo_core.weights.shared_memory import MemfdMemory, WeightGrant, WeightManifest
from grpo_core.weights.socket import connect_weights


@contextmanager
def server_that_sends(content: bytes, directory: Path) -> Iterator[Path]:
    """Sends the bytes to the first connection and closes it."""
    path = directory / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(BrokenPipeError):  # the client may be gone
                connection.sendall(content)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield path
        finally:
            thread.join()


def framed(payload: str) -> bytes:
    return struct.pack(">I", len(payload)) + payload.encode()


MANIFEST = WeightManifest(generation="g", model="m", total_bytes=8, parameters={})
GRANT = WeightGrant(session="s", manifest=MANIFEST, memory=MemfdMemory())
NO_DESCRIPTOR = framed(GRANT.model_dump_json())


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        pytest.param(b"\0\0\0\x20cut", ServiceUnavailable, "the server is ending", id="cut"),
        pytest.param(framed('{"refused": "no"}'), ServiceUnavailable, ": no", id="refused"),
        pytest.param(b"HTTP/1.1", ProtocolViolation, "above the limit", id="an endless frame"),
        pytest.param(framed("{}"), ProtocolViolation, "weight socket: ", id="no grant"),
        pytest.param(
            NO_DESCRIPTOR, ProtocolViolation, "sent 0 file descriptors instead of 1", id="no memory"
        ),
    ],
)
def test_each_way_to_get_no_grant_has_its_error(
    content: bytes, error: type[GrpoError], message: str, tmp_path: Path
) -> None:
    with server_that_sends(content, tmp_path) as path, pytest.raises(error, match=message):
        connect_weights(path)


def test_a_server_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: 4321)
    with (
        server_that_sends(framed('{"refused": "no"}'), tmp_path) as path,
        pytest.raises(ProtocolViolation, match=f"user {own}, the trainer as 4321"),
    ):
        connect_weights(path)


def test_nobody_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(ServiceUnavailable, match="start vllm-api-server with --share-weights"):
        connect_weights(tmp_path / "nothing")
