"""What `make clean-all` lists and removes. Results of runs stay."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def clean_all(directory: Path, *words: str) -> str:
    return subprocess.run(
        ["make", "--no-print-directory", "clean-all", *words],
        cwd=directory,
        env=os.environ | {"XDG_CACHE_HOME": str(directory / "my cache"), "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_it_lists_sizes_and_removes_all_but_results_if_asked(tmp_path: Path) -> None:
    for file in ("Makefile", "containers/containers.mk", "helm/helm.mk"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    models, venv, run = (tmp_path / name for name in ("my cache/grpo/tiny", ".venv", "runs/latest"))
    for directory in (models, venv, run):
        directory.mkdir(parents=True)
        (directory / "content").write_bytes(bytes(2_000_000))
    listed = clean_all(tmp_path)
    assert "\t.venv\n" in listed
    assert f"\t{tmp_path}/my cache/grpo\n" in listed
    assert "\ttotal\n" in listed
    (tmp_path / "my").mkdir()
    clean_all(tmp_path, "REMOVE=0")
    assert models.exists()
    clean_all(tmp_path, "REMOVE=1")
    assert (tmp_path / "my").exists()
    assert (models.exists(), venv.exists(), run.exists()) == (False, False, True)
    assert "nothing to remove" in clean_all(tmp_path)
