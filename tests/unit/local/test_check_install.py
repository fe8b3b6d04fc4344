"""The environment that this test runs in is a good one; bad ones are made by adding metadata."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_local.check_install import problems


def install(directory: Path, name: str) -> None:
    """As far as package metadata tells."""
    metadata = directory / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")


def test_nothing_stands_in_the_way_here() -> None:
    assert problems() == []


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("torchvision", "pip uninstall torchvision"),
        ("nvidia-cublas", "TORCH_INDEX_URL set to PyTorch's index of CPU wheels"),
    ],
)
def test_cuda_builds_are_named_with_the_way_out(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, name)
    monkeypatch.syspath_prepend(tmp_path)
    (problem,) = problems()
    assert told in problem
