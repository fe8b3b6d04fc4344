"""Valid directories of weights are accepted, the others are rejected; the trainer's end of the
weight socket. `test_shared_weights` tests granted memory."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from grpo_core.errors import GrpoError, ProtocolViolation, ServiceUnavailable
from grpo_core.weights.directory_checks import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MODEL_CONFIG,
    UnusableWeights,
    check_weights,
    directory_digest,
    lora_config,
    require_lora_tensors,
    require_servable_adapter,
)
from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_core.weights.shared_memory import MemfdMemory, WeightGrant, WeightManifest
from grpo_core.weights.socket import connect_weights


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    path = tmp_path / "root" / "adapter"
    path.mkdir(parents=True)
    (path / ADAPTER_CONFIG).write_text('{"r": 8, "rank_pattern": {"q_proj": 24}}')
    (path / ADAPTER_WEIGHTS).write_bytes(b"\0" * 1000)
    return path


def checked(adapter: Path, digest: str = "", kind: WeightKind = WeightKind.ADAPTER) -> Path:
    return check_weights(WeightRef(kind=kind, path=adapter, digest=digest), adapter.parent)


def test_a_whole_one_is_taken_wherever_it_lies(adapter: Path) -> None:
    digest = directory_digest(adapter)
    assert checked(adapter, digest) == adapter.resolve()
    assert directory_digest(adapter.rename(adapter.with_name("elsewhere"))) == digest


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda at: (at / ADAPTER_WEIGHTS).write_bytes(b"\0" * 999 + b"\1"), id="byte"),
        pytest.param(lambda at: (at / ADAPTER_CONFIG).rename(at / "other.json"), id="name"),
        pytest.param(lambda at: (at / "empty").touch(), id="further file"),
    ],
)
def test_every_change_shows_in_the_digest(adapter: Path, change: Callable[[Path], object]) -> None:
    before = directory_digest(adapter)
    change(adapter)
    assert directory_digest(adapter) != before


@pytest.mark.parametrize("name", ["..", "../adapter-outside", "link"])
def test_nothing_outside_the_root_is_taken(adapter: Path, name: str) -> None:
    root = adapter.parent
    outside = root.parent / "adapter-outside"
    outside.mkdir()
    (root / "link").symlink_to(outside)
    with pytest.raises(UnusableWeights, match="is not in"):
        check_weights(WeightRef(kind=WeightKind.ADAPTER, path=root / name), root)


def test_what_cannot_be_read_is_refused(adapter: Path) -> None:
    root = adapter.parent
    (root / "circle").symlink_to(root / "circle")
    for name in ("x" * 300, "circle"):
        with pytest.raises(UnusableWeights, match=rf"{name}.*(too long|loop|levels)"):
            check_weights(WeightRef(kind=WeightKind.ADAPTER, path=root / name), root)
    with pytest.raises(FileNotFoundError):
        directory_digest(root / "gone")
    (adapter / "\udcff").touch()  # a byte that is not UTF-8
    assert checked(adapter, directory_digest(adapter))


def test_half_written_weights_and_other_bytes_than_announced_are_refused(adapter: Path) -> None:
    with pytest.raises(UnusableWeights, match="the trainer sent 0000"):
        checked(adapter, "0" * 64)
    (adapter / ADAPTER_WEIGHTS).unlink()
    missing = f"not a complete adapter; missing: {ADAPTER_WEIGHTS}"
    with pytest.raises(UnusableWeights, match=missing):
        checked(adapter)
    with pytest.raises(UnusableWeights, match=rf"missing: {MODEL_CONFIG}, \*\.safetensors"):
        checked(adapter, kind=WeightKind.CHECKPOINT)


def test_the_rank_is_the_largest_of_all_modules(adapter: Path) -> None:
    assert lora_config(adapter).rank == 24
    require_servable_adapter(adapter, 24)
    with pytest.raises(UnusableWeights, match=r"rank 24, .* at most 16; .* --max-lora-rank 24"):
        require_servable_adapter(adapter, 16)


ON_THE_HEAD = '{"r": 8, "target_modules": ["q_proj", "lm_head"]}'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (ON_THE_HEAD, r"no adapter on lm_head .*; name other modules"),
        *((text, "is not a LoRA configuration") for text in ("{", "[]", '{"r": Infinity}')),
    ],
)
def test_a_configuration_that_is_none_and_an_adapter_on_the_head_are_refused(
    adapter: Path, text: str, problem: str
) -> None:
    (adapter / ADAPTER_CONFIG).write_text(text)
    with pytest.raises(UnusableWeights, match=problem):
        require_servable_adapter(adapter, 8)


Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        ({}, "has no tensors"),
        ({"A": (24, 4), "B": (4, 24)}, None),
        ({"A": (16, 4), "B": (4, 16)}, r"\[16, 4\] and \[4, 16\], .* gives rank 8 or 24"),
        ({"A": (8, 4)}, r"\[8, 4\] and None"),
        ({"B": (4, 8)}, r"None and \[4, 8\]"),
        ({"A": (0,), "B": (0,)}, r"\[0\] and \[0\]"),
    ],
)
def test_tensors_that_do_not_fit_the_rank_are_refused(
    adapter: Path, shapes: dict[str, tuple[int, ...]], problem: str | None
) -> None:
    tensors = {f"{Q_PROJ}{side}.weight": np.zeros(shape) for side, shape in shapes.items()}
    save_file(tensors, adapter / ADAPTER_WEIGHTS)
    with pytest.raises(UnusableWeights, match=problem) if problem else contextlib.nullcontext():
        require_lora_tensors(adapter)


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
