from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo_core.errors import ProtocolViolation, ServiceUnavailable
from grpo_core.weight_socket import connect_weights


@contextmanager
def server_that_says(content: bytes, directory: Path) -> Iterator[Path]:
    """Sends the bytes to the first who connects, and closes."""
    path = directory / "s"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(content)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield path
    finally:
        thread.join()
        listener.close()


def test_a_server_that_ends_before_the_grant_is_unavailable(tmp_path: Path) -> None:
    with (
        server_that_says(b"", tmp_path) as path,
        pytest.raises(ServiceUnavailable, match="the server is ending"),
    ):
        connect_weights(path)


def test_a_refusal_that_is_cut_short_is_unavailable(tmp_path: Path) -> None:
    with (
        server_that_says(b"\0\0\0\x20another", tmp_path) as path,
        pytest.raises(ServiceUnavailable, match="the server is ending"),
    ):
        connect_weights(path)


def test_a_refusal_is_told(tmp_path: Path) -> None:
    with (
        server_that_says(b"\0\0\0\7go away", tmp_path) as path,
        pytest.raises(ServiceUnavailable, match="go away"),
    ):
        connect_weights(path)


def test_other_bytes_are_a_protocol_violation(tmp_path: Path) -> None:
    with (
        server_that_says(b"HT", tmp_path) as path,
        pytest.raises(ProtocolViolation, match="is it the socket of vllm-api-server"),
    ):
        connect_weights(path)


def test_nobody_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(ServiceUnavailable, match="start vllm-api-server with --share-weights"):
        connect_weights(tmp_path / "nothing")
