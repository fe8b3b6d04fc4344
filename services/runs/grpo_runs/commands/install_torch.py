"""`python install_torch.py DEVICE`: installs the pinned torch into this Python environment.

DEVICE is cpu or cuda, as in `make install DEVICE=cuda`. Runs before anything else is installed.
Most package indexes offer a CUDA build of torch only. It also works on a CPU, but is larger.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[4] / "requirements" / "constraints.txt"
PYTORCH_INDEX = {
    "cpu": "https://download.pytorch.org/whl/cpu",
    "cuda": "https://download.pytorch.org/whl/cu130",
}
SECONDS_TO_ANSWER = 5
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def install(device: str, pytorch_index: str, given_index: str = "") -> None:
    """Take the build for the device from the configured index, else from PyTorch's; for a CPU, else
    what the configured index has.

    Args:
        given_index: the only index to look into

    Raises:
        SystemExit: there is no build for the device, or pip failed.
    """
    version = pinned("torch")
    for index in [given_index] if given_index else ["", pytorch_index]:
        if (build := offered(version, device, index)) is not None:
            say(f"torch {build}: from {index or 'the package index'}")
            # The lock has what a CPU build needs.
            return run_pip(*["--no-deps"] * (device == "cpu"), *at(index), exactly(build))
    if device == "cuda" or given_index:
        raise SystemExit(
            f"{given_index or 'the package index'} has no build of torch {version} for "
            f"DEVICE={device}; set TORCH_INDEX_URL to an index that has one"
        )
    say(
        f"torch {version}: no index with a CPU build answers, so pip takes the build of the "
        "package index; a CUDA build also works on a CPU, and is about 4 GB larger"
    )
    run_pip(f"torch=={version}")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def pinned(name: str) -> str:
    found = re.search(rf"^{name}==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert found, f"{CONSTRAINTS} has no line {name}=="
    return found[1]


def at(index: str) -> list[str]:
    return ["--index-url", index] if index else []


def offered(version: str, device: str, index: str) -> str | None:
    """The version, with its local part, of a build for the device: 2.13.0+cpu, 2.13.0+cu130, or
    2.13.0, the name of the CUDA build on the public index."""
    asked = ["--timeout", str(SECONDS_TO_ANSWER), "--retries", "0"] if index else []
    command = [*PIP, "index", "versions", *asked, *at(index), "torch"]
    # A failure is said again by `pip install`.
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    _, _, line = listed.partition("Available versions: ")  # below it, what is installed
    return next(
        (
            build
            for build in line.partition("\n")[0].split(", ")
            if build.partition("+")[0] == version and build.endswith("+cpu") == (device == "cpu")
        ),
        None,
    )


def exactly(build: str) -> str:
    """`torch==2.13.0` would also be met by, and prefer, 2.13.0+cpu."""
    return f"torch=={build}" if "+" in build else f"torch==={build}"


def run_pip(*arguments: str) -> None:
    command = [*PIP, "install", "--quiet", "--constraint", os.fspath(CONSTRAINTS), *arguments]
    if code := subprocess.run(command, check=False).returncode:
        raise SystemExit(code)


def main() -> None:
    device = sys.argv[1]
    install(device, PYTORCH_INDEX[device], os.environ.get("TORCH_INDEX_URL", ""))


if __name__ == "__main__":
    main()
