"""The model of a run is found or refused before anything loads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_trainer.errors import UnusableSavePath
from grpo_trainer.model_source import ModelNotFound, provide, require_writable
from tests.support.directories import names


def test_a_directory_with_a_model_is_used(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert provide(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["missing", "tiny"])
def test_a_directory_without_a_model_is_refused_and_left_as_it_is(
    name: str, tmp_path: Path
) -> None:
    """One named tiny is made only if it is missing: any other belongs to somebody."""
    if name == "tiny":
        (tmp_path / name).mkdir()
    before = names(tmp_path)
    with pytest.raises(ModelNotFound, match=r"no config.json there; name a directory that"):
        provide(str(tmp_path / name))
    assert names(tmp_path) == before


def test_a_save_path_is_made_or_refused(tmp_path: Path) -> None:
    require_writable(tmp_path / "new")
    assert names(tmp_path / "new") == []
    (tmp_path / "file").touch()
    with pytest.raises(UnusableSavePath, match=rf"uid {os.getuid()} can write, or give it to that"):
        require_writable(tmp_path / "file")


def test_a_model_that_no_hub_has_ends_it_with_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "grpo_trainer.model_source", "nobody/no-such-model"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "ModelNotFound" in done.stderr
    assert "nobody/no-such-model: not to be had from the hub" in done.stderr
    assert "Traceback" not in done.stderr
