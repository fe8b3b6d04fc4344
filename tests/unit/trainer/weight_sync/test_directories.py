"""The directories of published versions: their manifests and deltas, and which ones stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_core.weights.delta import apply_delta
from grpo_core.weights.versions import MANIFEST, Announcement, Manifest, VersionKind, version_of
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.weight_sync import directories as version_directories
from grpo_trainer.weight_sync.directories import VersionDirectories
from tests.support.directories import names

FILE, DELTA = "model.safetensors", "model.safetensors.delta"


class Run:
    """Publishes versions of a tiny model; each changes its last norm, or all parameters."""

    def __init__(self, model: str, root: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self.weights = TrainedWeights(model)
        self.policy: Any = self.weights.load(dtype)
        self.directories = VersionDirectories(root, with_deltas=True)
        self.root = root
        self.step = 0

    def write(self, changes_all: bool = False) -> Announcement:
        self.step += 1
        parameters = [*self.policy.parameters()]
        with torch.no_grad():
            for parameter in parameters if changes_all else parameters[-1:]:
                parameter.copy_(torch.randn_like(parameter))
        return self.directories.write(PolicyVersion(1, self.step), self.weights, self.policy)

    def manifest(self, announced: Announcement) -> Manifest:
        text = (self.root / announced.id / MANIFEST).read_bytes()
        return Manifest.parse(text, announced.manifest_sha256)


def test_a_delta_and_its_parent_give_the_announced_file(model: str, tmp_path: Path) -> None:
    run = Run(model, tmp_path / "served")
    first, second = run.write(), run.write()
    assert (first.kind, first.parent) == (VersionKind.FULL, "")
    assert (second.kind, second.parent) == (VersionKind.DELTA, "1-1")
    manifest = run.manifest(second)
    assert second.digest == manifest.digest != first.digest
    assert second.bytes == manifest.delta_bytes < 0.4 * manifest.full_bytes
    assert first.bytes == run.manifest(first).full_bytes
    result = tmp_path / "result"
    apply_delta(run.root / "1-1" / FILE, run.root / "1-2" / DELTA, result)
    assert result.read_bytes() == (run.root / "1-2" / FILE).read_bytes()
    assert manifest == Manifest.of(run.root / "1-2")


def test_a_large_change_and_float32_have_no_delta(model: str, tmp_path: Path) -> None:
    large = Run(model, tmp_path / "large")
    single = Run(model, tmp_path / "float32", torch.float32)
    for run, changes_all in ((large, True), (single, False)):
        run.write()
        assert run.write(changes_all).kind is VersionKind.FULL
        assert not (run.root / "1-2" / DELTA).exists()


def test_one_of_so_many_versions_is_whole(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_directories, "ANCHOR_EVERY", 3)
    run = Run(model, tmp_path)
    kinds = "".join(run.write().kind.value[0] for _ in range(7))
    assert kinds == "fddfddf"


def test_deltas_that_add_up_to_the_whole_size_end_with_a_whole_version(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(model, tmp_path)
    first, second = run.write(), run.write()
    monkeypatch.setattr(version_directories, "LARGEST_DELTAS", 3.5 * second.bytes / first.bytes)
    assert "".join(run.write().kind.value[0] for _ in range(4)) == "ddfd"


def kept(root: Path, versions: dict[str, str], in_use: set[str]) -> dict[str, list[str]]:
    """What stays of directories. Args: versions: "full" or "delta", by id"""
    for name, kind in versions.items():
        (root / name).mkdir()
        (root / name / FILE).touch()
        if kind == "delta":
            (root / name / DELTA).touch()
    removed = VersionDirectories(root).remove_older(in_use)
    assert {*versions} - {*names(root)} == {f"{v.epoch}-{v.step}" for v in removed}
    return {name: names(root / name) for name in sorted(names(root), key=version_of)}


def test_the_newest_two_the_anchor_its_deltas_and_those_in_use_stay(tmp_path: Path) -> None:
    versions = {
        **{"1-8": "delta", "1-9": "full", "1-10": "delta", "1-11": "full"},
        **{"2-11": "delta", "2-12": "delta", "2-13": "delta", "2-14": "delta"},
    }
    assert kept(tmp_path, versions, {"1-9", "2-12"}) == {
        "1-9": [FILE],
        "1-11": [FILE],
        "2-11": [DELTA],
        "2-12": [FILE, DELTA],
        "2-13": [FILE, DELTA],
        "2-14": [FILE, DELTA],
    }


def test_without_deltas_the_newest_two_stay(tmp_path: Path) -> None:
    versions = {f"1-{step}": "full" for step in (1, 2, 3, 10)}
    assert [*kept(tmp_path, versions, set())] == ["1-3", "1-10"]
