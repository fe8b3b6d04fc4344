"""The trainer's end of the weight socket. Granted memory: `test_shared_weights`."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo_core.errors import GrpoError, ProtocolViolation, ServiceUnavailable
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
def server_that_sends(content: bytes, directory: Path) -> Iterator[Path]:
    """Sends the bytes to the first who connects, and closes."""
    path = directory / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
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


def framed(payload: str) -> bytes:
    return struct.pack(">I", len(payload)) + payload.encode()


def grant(memory: MemfdMemory | CudaMemory) -> WeightGrant:
    manifest = WeightManifest(generation="g", model="m", total_bytes=8, parameters={})
    return WeightGrant(session="s", manifest=manifest, memory=memory)


ON_A_GPU = CudaMemory(
    place=CudaPlace(
        device_uuid="GPU-1", device_name="GPU", torch="2", pid_namespace=1, shm_filesystem=2
    ),
    segments=(
        CudaSegment(
            start=0,
            nbytes=8,
            handle="0063ff",
            handle_offset=512,
            ref_counter="2f746f726368",
            ref_counter_offset=3,
            event="",
            event_sync_required=False,
        ),
    ),
)
NO_DESCRIPTOR = framed(grant(MemfdMemory()).model_dump_json())


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        pytest.param(b"", ServiceUnavailable, "the server is ending", id="nothing"),
        pytest.param(b"\0\0\0\x20cut", ServiceUnavailable, "the server is ending", id="cut"),
        pytest.param(framed('{"refused": "no"}'), ServiceUnavailable, ": no", id="refused"),
        pytest.param(b"HT", ProtocolViolation, "socket of vllm-api-server", id="not a frame"),
        pytest.param(b"HTTP/1.1", ProtocolViolation, "not plausible", id="an endless frame"),
        pytest.param(framed("{}"), ProtocolViolation, "weight socket: ", id="no grant"),
        pytest.param(NO_DESCRIPTOR, ProtocolViolation, "with 0 descriptors", id="no memory"),
    ],
)
def test_each_way_to_get_no_grant_has_its_error(
    content: bytes, error: type[GrpoError], message: str, tmp_path: Path
) -> None:
    with server_that_sends(content, tmp_path) as path, pytest.raises(error, match=message):
        connect_weights(path)


def test_nobody_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(ServiceUnavailable, match="start vllm-api-server with --share-weights"):
        connect_weights(tmp_path / "nothing")


def test_memory_on_a_gpu_comes_without_a_descriptor(tmp_path: Path) -> None:
    sent = grant(ON_A_GPU)
    content = framed(sent.model_dump_json())
    with server_that_sends(content, tmp_path) as path, connect_weights(path) as connection:
        assert (connection.grant, connection.fd) == (sent, -1)
