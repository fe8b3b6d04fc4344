"""A model whose files were cut off is named before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from grpo_core.settings.machine import missing_model


@pytest.mark.parametrize(
    ("kept", "problem"),
    [(None, None), (-1, "incomplete: it has "), (60, "damaged"), (4, "damaged"), (0, "damaged")],
)
def test_a_model_of_which_bytes_are_missing_is_named(
    kept: int | None, problem: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(8), "b": np.zeros((2, 2))}, weights, {"format": "np"})
    weights.write_bytes(weights.read_bytes()[:kept])
    found = missing_model(str(tmp_path))
    assert found is None if problem is None else found is not None and problem in found


@pytest.mark.parametrize(
    "head",
    [b"[" * 20_000, b'{"a": {"data_offsets": [0, null]}}', b'{"a": {"data_offsets": [0, "x"]}}'],
)
def test_a_head_of_another_form_is_damage(head: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    assert "model.safetensors is damaged" in (missing_model(str(tmp_path)) or "")


def test_a_file_that_a_download_has_not_brought_yet_is_named(tmp_path: Path) -> None:
    """The hub's cache has links to files that come later."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").symlink_to("nowhere")
    assert "model.safetensors cannot be read: No such file" in (missing_model(str(tmp_path)) or "")


@pytest.mark.parametrize("name", ["consolidated.safetensors", "._model.safetensors"])
def test_files_that_are_not_loaded_may_be_anything(name: str, tmp_path: Path) -> None:
    """A pointer of Git LFS that was not fetched, and the attributes of a file on macOS."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1")
    assert missing_model(str(tmp_path)) is None
