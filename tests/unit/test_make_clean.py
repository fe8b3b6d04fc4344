"""What `make clean` and `make clean-all` list and remove. Results of runs stay."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def make(directory: Path, target: str, *words: str) -> str:
    return subprocess.run(
        ["make", "--no-print-directory", target, *words],
        cwd=directory,
        env=os.environ | {"XDG_CACHE_HOME": str(directory / "my cache"), "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def copied(directory: Path) -> Path:
    """The Makefile and what it includes."""
    for file in ("Makefile", "containers/containers.mk", "helm/helm.mk"):
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, directory / file)
    return directory


def test_it_lists_sizes_and_removes_all_but_results_if_asked(tmp_path: Path) -> None:
    copied(tmp_path)
    models, venv, run = (tmp_path / name for name in ("my cache/grpo/tiny", ".venv", "runs/latest"))
    for directory in (models, venv, run):
        directory.mkdir(parents=True)
        (directory / "content").write_bytes(bytes(2_000_000))
    listed = make(tmp_path, "clean-all")
    assert "\t.venv\n" in listed
    assert f"\t{tmp_path}/my cache/grpo\n" in listed
    assert "\ttotal\n" in listed
    (tmp_path / "my").mkdir()
    make(tmp_path, "clean-all", "REMOVE=0")
    assert models.exists()
    assert make(tmp_path, "clean-all", "REMOVE=1").endswith("\nremoved\n")
    assert (tmp_path / "my").exists()
    assert (models.exists(), venv.exists(), run.exists()) == (False, False, True)
    assert "nothing to remove" in make(tmp_path, "clean-all")


def test_clean_removes_the_bytecode_of_the_clone_alone(tmp_path: Path) -> None:
    clone = copied(tmp_path / "clone")
    inside, outside = clone / "services/a b/__pycache__", tmp_path / "other/__pycache__"
    for directory in (inside, outside, clone / ".venv"):
        directory.mkdir(parents=True)
    (clone / "linked").symlink_to(outside.parent)
    assert make(clone, "clean") == "removed __pycache__ .venv\n"
    assert (inside.exists(), outside.exists(), (clone / ".venv").exists()) == (False, True, False)
