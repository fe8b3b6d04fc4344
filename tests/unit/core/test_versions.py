"""Versions of the weights: manifests, digests and deltas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from grpo_core.errors import ProtocolViolation
from grpo_core.weights import delta, versions
from grpo_core.weights.delta import BadDelta, apply_delta, write_delta
from grpo_core.weights.versions import (
    MANIFEST,
    FileParts,
    Manifest,
    WrongDigest,
    file_below,
    version_id,
    version_of,
)
from grpo_core.wire.policy_version import PolicyVersion

WORDS = 5000


def test_only_names_that_files_of_a_version_can_have_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "1-5").mkdir()
    (tmp_path / "1-5" / MANIFEST).touch()
    assert file_below(tmp_path, "1-5", MANIFEST) == tmp_path / "1-5" / MANIFEST
    for version, name in (("1-5", "a" * 3000), ("1" * 3000 + "-5", "a"), ("1-5", "..")):
        assert file_below(tmp_path, version, name) is None


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    path = tmp_path / "parent"
    path.write_bytes(np.arange(WORDS, dtype=np.uint16).tobytes())
    return path


def changed(parent: Path, places: list[int]) -> Path:
    words = np.frombuffer(parent.read_bytes(), np.uint16).copy()
    words[places] += 7
    path = parent.with_name("result")
    path.write_bytes(words.tobytes())
    return path


@pytest.mark.parametrize("places", [[], [0], [WORDS - 1], [0, 1, 999, 1000, 2500, WORDS - 1]])
def test_a_delta_gives_the_result(
    parent: Path, places: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "BLOCK_WORDS", 1000)
    result, target = changed(parent, places), parent.with_name("target")
    size = write_delta(parent, result, parent.with_name("delta"))
    apply_delta(parent, parent.with_name("delta"), target)
    assert target.read_bytes() == result.read_bytes()
    assert size == parent.with_name("delta").stat().st_size


def test_files_of_another_length_have_no_delta(parent: Path) -> None:
    longer = parent.with_name("longer")
    longer.write_bytes(parent.read_bytes() + b"12")
    assert write_delta(parent, longer, parent.with_name("delta")) is None


@pytest.mark.parametrize("keep", [3, 20, -1])
def test_a_damaged_delta_is_refused(parent: Path, keep: int) -> None:
    whole = parent.with_name("delta")
    write_delta(parent, changed(parent, [1, 2, 3]), whole)
    whole.write_bytes(whole.read_bytes()[:keep])
    with pytest.raises(BadDelta, match="cannot be applied"):
        apply_delta(parent, whole, parent.with_name("target"))


def test_a_manifest_describes_the_result_however_it_travels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "CHUNK_BYTES", 4)
    (tmp_path / "model.safetensors").write_bytes(b"0123456789")
    full = Manifest.of(tmp_path)
    (tmp_path / "model.safetensors.delta").write_bytes(b"012")
    (tmp_path / "manifest.json").write_text("is no part of the version")
    delta = Manifest.of(tmp_path)
    assert delta.digest == full.digest
    assert (delta.full_bytes, delta.delta_bytes) == (10, 3)
    spans = full.files["model.safetensors"].spans()
    assert [(first, count) for first, count, _ in spans] == [(0, 4), (4, 4), (8, 2)]
    (tmp_path / "model.safetensors").write_bytes(b"012345678X")
    assert Manifest.of(tmp_path).digest != full.digest


def test_a_manifest_is_read_only_with_its_digest() -> None:
    manifest = Manifest(files={"a.safetensors": FileParts(bytes=0, chunks=())})
    text = manifest.model_dump_json().encode()
    assert Manifest.parse(text, versions.sha256_of(text)) == manifest
    with pytest.raises(WrongDigest, match="announced digest"):
        Manifest.parse(text, "0" * 64)
    for name in ("../model", "/etc/passwd", "a/b", ""):
        text = text.replace(b"a.safetensors", name.encode())
        with pytest.raises(ProtocolViolation, match=r"manifest\.json"):
            Manifest.parse(text, versions.sha256_of(text))
        text = manifest.model_dump_json().encode()


def test_a_version_has_one_id() -> None:
    assert version_of(version_id(PolicyVersion(3, 12))) == PolicyVersion(3, 12)
