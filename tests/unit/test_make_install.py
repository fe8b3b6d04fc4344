"""What `make install` would run with other interpreters and on other systems."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ("make", "bash", "uname", "grep", "sed", "awk")
RUNS, FAILS = "exit 0", "exit 127"
"""Of an interpreter that can make environments; of a shim without an interpreter behind it."""


def planned(directory: Path, **programs: str) -> subprocess.CompletedProcess[str]:
    """The commands of `make install` with these programs, as shell scripts, on PATH.

    Args: directory: without a virtual environment
    """
    path = directory / "bin"
    path.mkdir()
    for name in PROGRAMS:
        (path / name).symlink_to(shutil.which(name) or name)
    for name, script in programs.items():
        file = path / name.replace("_", ".")
        file.unlink(missing_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
    return subprocess.run(
        ["make", "--no-print-directory", "-n", "install", f"VENV={directory / 'venv'}"],
        cwd=ROOT,
        env={"PATH": str(path), "HOME": os.environ.get("HOME", "/")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("programs", "made_by"),
    [
        ({"python3_13": RUNS, "python3_11": RUNS}, "/python3.13 -m venv"),
        ({"python3_13": FAILS, "python3_12": RUNS, "python3_11": RUNS}, "python3.12 -m venv"),
        ({"python3": RUNS}, "python3 -m venv"),
        ({"python3": FAILS, "uv": RUNS}, "uv venv --quiet --clear --seed"),
    ],
)
def test_the_newest_interpreter_that_works_is_taken(
    programs: dict[str, str], made_by: str, tmp_path: Path
) -> None:
    done = planned(tmp_path, **programs)
    assert made_by in done.stdout, done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("programs", "words"),
    [
        ({"python3": FAILS}, "no Python 3.11, 3.12 or 3.13 with venv was found"),
        ({"python3": RUNS, "uname": "echo Darwin"}, "Docker on macOS"),
    ],
)
def test_without_one_and_elsewhere_a_line_names_what_to_do(
    programs: dict[str, str], words: str, tmp_path: Path
) -> None:
    done = planned(tmp_path, **programs)
    assert words in done.stderr
    assert done.returncode != 0


def test_an_environment_that_is_there_needs_no_other_interpreter(tmp_path: Path) -> None:
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "pip").touch()
    done = planned(tmp_path, python3=FAILS)
    assert " -m venv" not in done.stdout
    assert "install_torch.py cpu" in done.stdout
    assert done.returncode == 0
