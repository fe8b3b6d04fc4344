"""Versions through a process group, between this process and receivers in threads of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from grpo_core.weights.collective import ARRIVING, Member
from grpo_core.weights.versions import MANIFEST, FileParts, Manifest, sha256_of
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.errors import TransferFailed
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.weight_sync import collective
from grpo_trainer.weight_sync.collective import (
    WEIGHTS,
    TransferGroup,
    VersionFiles,
    header_of,
    read_once,
)
from grpo_vllm.engine.vllm_compat import collective as receiving
from grpo_vllm.engine.vllm_compat.collective import Receiver
from tests.unit.trainer.tiny_policy import LORA, model_directory

HOST = torch.device("cpu")
SILENT_S = 60.0
VERSION = PolicyVersion(1, 5)
BUCKET, CHUNK = 4096, 512


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a tiny model takes many of them. Manifests have the chunks of a real bucket."""
    for module in (collective, receiving):
        monkeypatch.setattr(module, "BUCKET_BYTES", BUCKET)
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """In bfloat16, with a tied head, a vocabulary of 259 and persistent buffers, one in float32
    that follows an odd number of elements and one without dimensions."""
    model = AutoModelForCausalLM.from_pretrained(
        model_directory(tmp_path_factory.mktemp("odd")), dtype=torch.bfloat16
    )
    assert model.config.tie_word_embeddings
    assert model.config.vocab_size % 2
    model.register_parameter("odd", nn.Parameter(torch.randn(3).bfloat16()))
    model.register_buffer("bias", torch.randn(5))
    model.register_buffer("count", torch.tensor(7))
    model.register_buffer("temporary", torch.randn(2), persistent=False)
    return model


@pytest.fixture
def weights(odd: Any, monkeypatch: pytest.MonkeyPatch) -> TrainedWeights:
    trained = TrainedWeights(odd.name_or_path, None)
    monkeypatch.setattr(TrainedWeights, "write_configuration", _write_configuration)
    return trained


def _write_configuration(_weights: TrainedWeights, _policy: Any, directory: Path) -> None:
    (directory / "config.json").write_text("{}")
    (directory / "empty.txt").touch()


def parts_of(directory: Path) -> dict[str, FileParts]:
    """As in a manifest, with chunks of `CHUNK`."""
    found = {}
    for path in directory.iterdir():
        if path.name != MANIFEST:
            text = path.read_bytes()
            pieces = (text[i : i + CHUNK] for i in range(0, len(text), CHUNK))
            found[path.name] = FileParts(bytes=len(text), chunks=tuple(map(sha256_of, pieces)))
    return found


def received(directory: Path) -> Manifest:
    return Manifest.model_validate_json((directory / MANIFEST).read_bytes())


@contextmanager
def group_with(directories: dict[str, Path], workers: int = 1) -> Iterator[TransferGroup]:
    """This process and servers of so many workers, each with a directory for copies."""
    group = TransferGroup("localhost", HOST, SILENT_S)
    receivers = [
        Receiver(group.address, Member(name, number, workers), staging, HOST)
        for name, staging in directories.items()
        for number in range(workers)
    ]
    for receiver in receivers:
        receiver.start()
    group.admit(directories.keys(), SILENT_S)
    yield group
    group.leave()
    for receiver in receivers:
        receiver.join()


def test_a_policy_of_odd_sizes_arrives_whole(
    odd: Any, weights: TrainedWeights, tmp_path: Path
) -> None:
    with group_with({"a": tmp_path}) as group, VersionFiles.of(weights, odd) as files:
        for step in (5, 6):  # one after another in one group
            manifest = group.send(PolicyVersion(1, step), files)
            here = tmp_path / f"1-{step}{ARRIVING}"
            assert manifest == received(here)
            assert manifest.files == parts_of(here)
            loaded = load_file(here / WEIGHTS)
            expected = {k: v for k, v in odd.state_dict().items() if k != "lm_head.weight"}
            assert loaded.keys() == expected.keys()
            for name, tensor in expected.items():
                assert loaded[name].dtype == tensor.dtype
                assert torch.equal(loaded[name], tensor)
    assert len(manifest.files[WEIGHTS].chunks) > 2 * BUCKET / CHUNK


def test_an_adapter_arrives_whole(odd: Any, tmp_path: Path) -> None:
    trained = TrainedWeights(odd.name_or_path, LORA)
    policy = trained.load(torch.bfloat16, HOST)
    (own := tmp_path / "own").mkdir()
    trained.write_into(policy, own)
    (staging := tmp_path / "staging").mkdir()
    with group_with({"a": staging}) as group, VersionFiles.of(trained, policy) as files:
        assert group.send(VERSION, files).files == parts_of(own)
    assert parts_of(staging / f"1-5{ARRIVING}") == parts_of(own)


def test_workers_of_a_server_share_the_work_on_one_copy(
    odd: Any, weights: TrainedWeights, tmp_path: Path
) -> None:
    places = {name: tmp_path / name for name in ("a", "b")}
    for place in places.values():
        place.mkdir()
    with group_with(places, workers=2) as group, VersionFiles.of(weights, odd) as files:
        manifest = group.send(VERSION, files)
    assert len(group.members) == 4
    for place in places.values():
        assert parts_of(place / f"1-5{ARRIVING}") == manifest.files


def test_files_have_the_bytes_that_are_sent(
    odd: Any, weights: TrainedWeights, tmp_path: Path
) -> None:
    """A server that takes a version as files holds it under the announced digest."""
    taken: dict[str, bytes] = {}

    def take(name: str, first: int, bucket: torch.Tensor) -> list[Callable[[], Any]]:
        assert first == len(taken.setdefault(name, b""))
        taken[name] += bytes(bucket.tolist())
        return []

    with group_with({"a": tmp_path}) as group, VersionFiles.of(weights, odd) as files:
        assert group.send(VERSION, files) == read_once(files, take)
    here = tmp_path / f"1-5{ARRIVING}"
    assert taken == {n: (here / n).read_bytes() for n in taken}


def test_a_worker_that_cannot_write_holds_nobody_up(
    odd: Any, weights: TrainedWeights, tmp_path: Path
) -> None:
    places = {"a": tmp_path / "missing", "b": tmp_path}
    with (
        group_with(places) as group,
        VersionFiles.of(weights, odd) as files,
        pytest.raises(TransferFailed, match=r"worker 0 of a: .*No such file or directory"),
    ):
        group.send(VERSION, files)
    assert parts_of(tmp_path / f"1-5{ARRIVING}").keys() == {WEIGHTS, "config.json", "empty.txt"}


def test_a_chunk_with_a_wrong_digest_is_named(
    odd: Any, weights: TrainedWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "sha256_of", lambda _: "0" * 64)
    with (
        group_with({"a": tmp_path}) as group,
        VersionFiles.of(weights, odd) as files,
        pytest.raises(
            TransferFailed, match=r"config.json: wrong digest of chunk 0, and of \d+ more"
        ),
    ):
        group.send(VERSION, files)
    assert not (tmp_path / f"1-5{ARRIVING}" / MANIFEST).exists()


def test_only_whole_servers_are_admitted(tmp_path: Path) -> None:
    group = TransferGroup("localhost", HOST, SILENT_S)
    members = [Member("a", 0, 1), Member("half", 0, 2), Member("stranger", 0, 1)]
    receivers = [Receiver(group.address, each, tmp_path, HOST) for each in members]
    for receiver in receivers:
        receiver.start()
    group.admit({"a", "half", "absent"}, within_s=2.0)
    assert group.servers == {"a"}
    for outside in receivers[1:]:
        outside.join()
    group.leave()
    receivers[0].join()


def test_the_header_is_the_librarys(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 2), "a": torch.randn(5).bfloat16(), "c": torch.tensor(True)}
    data = b"".join(bytes(t.reshape(-1).view(torch.uint8).tolist()) for t in tensors.values())
    (file := tmp_path / "x.safetensors").write_bytes(header_of(tensors) + data)
    loaded = load_file(file)
    assert {n: (t.dtype, t.tolist()) for n, t in loaded.items()} == {
        n: (t.dtype, t.tolist()) for n, t in tensors.items()
    }
