"""Versions through a process group, between this process and receivers in threads of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs
from torch import nn
from transformers import AutoModelForCausalLM

from grpo_core.weights.collective import ARRIVING, GroupAddress
from grpo_core.weights.servers import ServerState, ServerStatus
from grpo_core.weights.versions import MANIFEST, FileParts, Manifest, sha256_of
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.model.weights_file import WEIGHTS
from grpo_trainer.weight_sync import collective
from grpo_trainer.weight_sync.collective import CollectiveDirectories, TransferGroup, streams_of
from grpo_vllm.engine.vllm_compat import collective as receiving
from grpo_vllm.engine.vllm_compat.collective import Receiver
from tests.support.shapes import SHAPES
from tests.unit.trainer.tiny_policy import LORA, model_directory

HOST = torch.device("cpu")
SILENT_S = 60.0
NEVER_S = 3600.0
"""Longer than the test may take."""
VERSION = PolicyVersion(1, 5)
NAME = f"1-5{ARRIVING}"
BUCKET, CHUNK = 4096, 512


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a tiny model takes many of them."""
    for module in (collective, receiving):
        monkeypatch.setattr(module, "BUCKET_BYTES", BUCKET)
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """In bfloat16, with a tied head, a vocabulary of 259 and persistent buffers, one in float32
    after an odd number of smaller elements and one without dimensions."""
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
def weights(odd: Any) -> TrainedWeights:
    return TrainedWeights(odd.name_or_path, None)


def parts_of(directory: Path) -> dict[str, FileParts]:
    """As in a manifest, with chunks of `CHUNK`."""
    found = {}
    for path in directory.iterdir():
        if path.name != MANIFEST:
            text = path.read_bytes()
            pieces = (text[i : i + CHUNK] for i in range(0, len(text), CHUNK))
            found[path.name] = FileParts(bytes=len(text), chunks=tuple(map(sha256_of, pieces)))
    return found


@contextmanager
def group_with(*places: Path, workers: int = 1) -> Iterator[TransferGroup]:
    """This process and servers of so many workers, each with a directory for copies."""
    servers = {str(place): (0, workers) for place in places}
    group = TransferGroup("localhost", HOST, "gloo", SILENT_S, servers)
    receivers = [
        Receiver(group.address, group.address.servers[str(place)][1], i, workers, place, HOST)
        for place in places
        for i in range(workers)
    ]
    for receiver in receivers:
        receiver.start()
    group.connect()
    yield group
    for receiver in receivers:
        receiver.leave()
        receiver.join()


def send(group: TransferGroup, weights: TrainedWeights, policy: Any, folder: Path) -> Manifest:
    (directory := folder / "small").mkdir()
    return group.send(VERSION, streams_of(weights, policy, directory))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_policy_of_odd_sizes_arrives_whole(
    workers: int, odd: Any, weights: TrainedWeights, tmp_path: Path
) -> None:
    places = [tmp_path / name for name in ("a", "b")]
    with group_with(*places, workers=workers) as group:
        manifest = send(group, weights, odd, tmp_path)
    for place in places:
        assert Manifest.model_validate_json((place / NAME / MANIFEST).read_bytes()) == manifest
        assert parts_of(place / NAME) == manifest.files
    loaded = load_file(places[0] / NAME / WEIGHTS)
    expected = {n: t for n, t in odd.state_dict().items() if n != "lm_head.weight"}
    assert {n: t.dtype for n, t in loaded.items()} == {n: t.dtype for n, t in expected.items()}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    assert len(manifest.files[WEIGHTS].chunks) > 2 * BUCKET / CHUNK


def test_a_group_brings_one_version_after_another(
    odd: Any, weights: TrainedWeights, tmp_path: Path
) -> None:
    with group_with(tmp_path / "a") as group:
        for step in range(3):
            (directory := tmp_path / f"small-{step}").mkdir()
            sent = group.send(PolicyVersion(1, step), streams_of(weights, odd, directory))
            assert parts_of(tmp_path / "a" / f"1-{step}{ARRIVING}") == sent.files
            assert not group._store.check([f"manifest/{step}"])


@pytest.mark.parametrize("adapter", [False, True])
def test_the_files_are_those_that_would_be_written(
    adapter: bool, odd: Any, weights: TrainedWeights, tmp_path: Path
) -> None:
    """A server that takes the version as files finds the announced digest."""
    policy = odd
    if adapter:
        weights = TrainedWeights(odd.name_or_path, LORA)
        policy = weights.load(torch.bfloat16, HOST)
    (written := tmp_path / "written").mkdir()
    weights.write_into(policy, written)
    with group_with(tmp_path / "a") as group:
        manifest = send(group, weights, policy, tmp_path)
    assert manifest.text == Manifest(files=dict(sorted(parts_of(written).items()))).text


@pytest.mark.parametrize("shape", ["GPT-2", "Qwen3 MoE"])
def test_names_are_those_of_the_models_own_files(shape: str, tmp_path: Path) -> None:
    own = SHAPES[shape].save(tmp_path / "own")
    policy = AutoModelForCausalLM.from_pretrained(own)
    (written := tmp_path / "written").mkdir()
    TrainedWeights(str(own), None).write_into(policy, written)
    found, expected = load_file(written / WEIGHTS), load_file(own / WEIGHTS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_worker_that_cannot_write_says_so(
    odd: Any, weights: TrainedWeights, tmp_path: Path
) -> None:
    (file := tmp_path / "file").touch()
    with group_with(file) as group, pytest.raises(RuntimeError):
        send(group, weights, odd, tmp_path)
    assert group._store.get("done/0/1").decode().endswith(f"File exists: '{file}'")


def test_a_worker_writes_into_no_directory_that_others_can_change(
    odd: Any, weights: TrainedWeights, tmp_path: Path
) -> None:
    (place := tmp_path / "a").mkdir(mode=0o755)
    with group_with(place) as group, pytest.raises(RuntimeError):
        send(group, weights, odd, tmp_path)
    assert "has mode 0755; delete it" in group._store.get("done/0/1").decode()
    assert list(place.iterdir()) == []


def test_nccl_does_not_begin_without_a_member() -> None:
    """It would wait for one without a limit."""
    group = TransferGroup("localhost", HOST, "nccl", 0.1, {"a": (0, 1)})
    with pytest.raises(RuntimeError, match="here/1"):
        group.connect()


@pytest.mark.parametrize("worker", [0, 1])
def test_a_chunk_with_a_wrong_digest_is_named(
    worker: int,
    odd: Any,
    weights: TrainedWeights,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the worker that completes the directory has the right ones."""
    calls = iter(range(10_000))

    def spoiled(piece: memoryview) -> str:
        return sha256_of(piece) if next(calls) != worker else "0" * 64

    monkeypatch.setattr(receiving, "sha256_of", spoiled)
    with (
        group_with(tmp_path / "a", workers=2) as group,
        pytest.raises(RuntimeError, match=r"chunks arrived with a wrong digest: .*config\.json"),
    ):
        send(group, weights, odd, tmp_path)
    assert not (tmp_path / "a" / NAME / MANIFEST).exists()


class Watch:
    """`ServerWatch` and its `VersionLog`: servers that join each group with one worker. Their names
    are their directories."""

    def __init__(self, *places: Path) -> None:
        self.by_files = 0
        self.pids = dict.fromkeys(map(str, places), 1)
        self.versions = self
        self.receivers: list[Receiver] = []
        self.unreached: set[str] = set()
        """Servers whose network does not reach the trainer."""

    def servers(self) -> dict[str, ServerStatus]:
        facts: dict[str, Any] = {"state": ServerState.SERVING, "epoch": 1, "step": 0, "workers": 1}
        return {n: ServerStatus(name=n, engine_pid=p, **facts) for n, p in self.pids.items()}

    def invite(self, address: GroupAddress) -> None:
        self.receivers = [
            Receiver(address, rank, 0, 1, Path(name), HOST)
            for name, (_, rank) in address.servers.items()
            if name not in self.unreached
        ]
        for receiver in self.receivers:
            receiver.start()

    def all_left(self) -> None:
        for receiver in self.receivers:
            receiver.leave()
            receiver.join()


def directories_of(watch: Watch, root: Path, silent_s: float = NEVER_S) -> CollectiveDirectories:
    made = CollectiveDirectories(root, watch, "localhost", silent_s)  # type: ignore[arg-type]
    made.prepare()
    return made


def test_a_group_is_formed_again_when_an_engine_restarts(
    odd: Any, weights: TrainedWeights, tmp_path: Path
) -> None:
    watch = Watch(tmp_path / "a", tmp_path / "b")
    directories = directories_of(watch, tmp_path / "served")
    groups = set()
    for step in range(4):
        if step == 2:
            watch.pids[str(tmp_path / "b")] = 2
        announced = directories.write(PolicyVersion(1, step), weights, odd)
        groups.add(watch.receivers[0])
        for name in watch.pids:
            manifest = (Path(name) / f"1-{step}{ARRIVING}" / MANIFEST).read_bytes()
            assert sha256_of(manifest) == announced.manifest_sha256
    assert len(groups) == 2
    assert watch.by_files == 0
    assert list((tmp_path / "served").iterdir()) == []
    watch.all_left()


def test_after_a_failed_transfer_all_have_left_and_the_version_has_files(
    odd: Any, weights: TrainedWeights, tmp_path: Path
) -> None:
    (broken := tmp_path / "broken").touch()
    watch = Watch(tmp_path / "a", broken)
    directories = directories_of(watch, tmp_path / "served")
    with capture_logs() as logs:
        directories.write(VERSION, weights, odd)
    for receiver in watch.receivers:
        receiver.join()  # the trainer has ended the group, nobody waits for it
    assert [e["event"] for e in logs if e["log_level"] == "warning"].count("weights.by_files") == 1
    assert watch.by_files == 1
    assert [path.name for path in (tmp_path / "served").iterdir()] == ["1-5"]
    assert not (tmp_path / "a" / NAME).exists()
    broken.unlink()
    directories.write(PolicyVersion(1, 6), weights, odd)
    assert watch.by_files == 1
    assert (broken / f"1-6{ARRIVING}" / MANIFEST).exists()
    watch.all_left()


@pytest.mark.parametrize("others", [pytest.param((), marks=pytest.mark.full), ("b",)])
def test_a_server_that_did_not_join_is_waited_for_once(
    others: tuple[str, ...], odd: Any, weights: TrainedWeights, tmp_path: Path
) -> None:
    """Until it is another engine."""
    watch = Watch(*(tmp_path / name for name in ("a", *others)))
    watch.unreached = {str(tmp_path / "a")}
    directories = directories_of(watch, tmp_path / "served", silent_s=4.0)
    with capture_logs() as logs:
        for step in range(3):
            directories.write(PolicyVersion(1, step), weights, odd)
    absent = [entry["servers"] for entry in logs if entry["event"] == "transfer_group.absent"]
    assert absent == [[str(tmp_path / "a")]]
    assert watch.by_files == (1 if others else 3)
    if others:
        assert (tmp_path / "b" / f"1-2{ARRIVING}" / MANIFEST).exists()
    watch.pids[str(tmp_path / "a")], watch.unreached = 2, set()
    directories.write(PolicyVersion(1, 3), weights, odd)
    assert (tmp_path / "a" / f"1-3{ARRIVING}" / MANIFEST).exists()
    watch.all_left()
