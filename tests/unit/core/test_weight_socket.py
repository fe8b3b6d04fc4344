from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo_core.errors import ProtocolViolation, ServiceUnavailable
from grpo_core.weight_manifest import WeightManifest
from grpo_core.weight_socket import connect_weights
from grpo_core.weight_transport import (
    CudaMemory,
    CudaPlace,
    CudaSegment,
    MemfdMemory,
    WeightGrant,
)


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


def framed(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def grant(memory: MemfdMemory | CudaMemory) -> WeightGrant:
    manifest = WeightManifest(generation="g", model="m", total_bytes=8, parameters={})
    return WeightGrant(session="s", manifest=manifest, memory=memory)


def on_a_gpu() -> CudaMemory:
    segment = CudaSegment(
        start=0,
        nbytes=8,
        handle="0063ff",
        handle_offset=512,
        ref_counter="2f746f726368",
        ref_counter_offset=3,
        event="",
        event_sync_required=False,
    )
    place = CudaPlace(
        device_uuid="GPU-1", device_name="GPU", torch="2", pid_namespace=1, shm_filesystem=2
    )
    return CudaMemory(place=place, segments=(segment,))


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
        server_that_says(framed(b'{"refused": "go away"}'), tmp_path) as path,
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


def test_memory_on_a_gpu_comes_without_a_descriptor(tmp_path: Path) -> None:
    sent = grant(on_a_gpu())
    content = framed(sent.model_dump_json().encode())
    with server_that_says(content, tmp_path) as path, connect_weights(path) as connection:
        assert connection.grant == sent
        assert connection.fd == -1


def test_memory_that_should_come_as_a_descriptor_and_does_not(tmp_path: Path) -> None:
    content = framed(grant(MemfdMemory()).model_dump_json().encode())
    with (
        server_that_says(content, tmp_path) as path,
        pytest.raises(ProtocolViolation, match="kind memfd with 0 descriptors"),
    ):
        connect_weights(path)
