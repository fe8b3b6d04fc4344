"""The packages work as they would be published: built, installed without this repository, run."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [*ROOT.glob("*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml")]
DEADLINE_S = 600.0

pytestmark = [pytest.mark.full, pytest.mark.timeout(DEADLINE_S + 60)]


def run(command: list[str], where: Path) -> str:
    """Without the variables that lead to this repository."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=where, env=own, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each wheel is built from the source distribution."""
    dist = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist)]
    for directory in [ROOT, *(file.parent for file in PACKAGES)]:
        run([*build, str(directory)], ROOT)
    return dist


def test_wheels_contain_every_file_of_the_packages(dist: Path) -> None:
    packed = {name for wheel in dist.glob("*.whl") for name in zipfile.ZipFile(wheel).namelist()}
    listed = run(["git", "ls-files", "shared", "services"], ROOT).splitlines()
    names = {file[file.index("/grpo_") + 1 :] for file in listed if "/grpo_" in file}
    assert names - packed == set()


def test_every_wheel_names_its_licence(dist: Path) -> None:
    for wheel in dist.glob("*.whl"):
        archive = zipfile.ZipFile(wheel)
        (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        assert b"License-Expression: MIT\n" in archive.read(metadata), wheel.name


def test_a_run_trains_with_the_installed_wheels_alone(dist: Path, tmp_path: Path) -> None:
    run([sys.executable, "-m", "venv", "venv"], tmp_path)
    python = tmp_path / "venv/bin/python"
    site = run([str(python), "-c", "import sysconfig as s; print(s.get_path('purelib'))"], tmp_path)
    # Other people's packages: those of this environment. Editable ones are not found through it.
    Path(site.strip(), "others.pth").write_text(sysconfig.get_path("purelib"))
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(dist)]
    names = [wheel.name.split("-")[0] for wheel in dist.glob("*.whl")]
    run([str(python), *install, "--force-reinstall", "--no-deps", *names], tmp_path)
    code = "import grpo_core, grpo_trainer; print(grpo_core.__file__, grpo_trainer.__file__)"
    assert all(str(tmp_path) in file for file in run([str(python), "-c", code], tmp_path).split())
    demo = str(tmp_path / "venv/bin/grpo-demo")
    shown = run([demo, "--steps", "2", "--eval-every", "0"], tmp_path)
    assert "2/2" in shown
    assert list(tmp_path.glob("runs/*/report.html"))
