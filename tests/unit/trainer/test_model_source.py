"""Where the model of a run comes from, before anything loads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_trainer.errors import UnusableSavePath
from grpo_trainer.model_source import ModelNotFound, provide, require_writable


def test_a_directory_with_a_model_is_taken_as_it_is(tiny_model: Path) -> None:
    assert provide(str(tiny_model)) == tiny_model


def test_a_directory_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config.json there; name a directory that"):
        provide(str(tmp_path))


def test_only_a_directory_named_tiny_is_made(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        provide(str(tmp_path / "missing"))
    assert not (tmp_path / "missing").exists()
    # One that is there is somebody's, whatever its name.
    (tmp_path / "tiny").mkdir()
    with pytest.raises(ModelNotFound):
        provide(str(tmp_path / "tiny"))


def test_the_save_path_is_made_and_left_as_it_is(tmp_path: Path) -> None:
    require_writable(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_save_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnusableSavePath, match=rf"uid {os.getuid()} can write, or give it to that"):
        require_writable(tmp_path / "file")


def test_what_no_hub_has_ends_it_with_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "grpo_trainer.model_source", "nobody/no-such-model"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 1
    assert "ModelNotFound" in done.stderr
    assert "nobody/no-such-model: not to be had from the hub" in done.stderr
    assert "Traceback" not in done.stderr
