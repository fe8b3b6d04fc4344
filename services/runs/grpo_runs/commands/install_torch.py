"""`python install_torch.py DEVICE`: installs the pinned torch into this Python environment.

DEVICE is cpu or cuda, as in `make install DEVICE=cuda`. Runs before anything else is installed.
Most package indexes offer a CUDA build of torch only. It also works on a CPU, but is larger.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[4] / "requirements" / "constraints.txt"
PYTORCH_INDEX = {
    "cpu": "https://download.pytorch.org/whl/cpu",
    "cuda": "https://download.pytorch.org/whl/cu130",
}
SECONDS_TO_ANSWER = 5
"""Of PyTorch's index, which many networks do not reach."""
LONGEST_LOOK_S = 30
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def install(device: str, pytorch_index: str, given_index: str = "") -> None:
    """Take the build for the device from the configured index, else from PyTorch's; for a CPU, else
    what the configured index has. A build that is there and works on the device stays.

    Args:
        given_index: the only index to look into

    Raises:
        SystemExit: there is no build for the device, or pip failed.
    """
    pinned = pinned_version()
    if is_usable(installed_version(), pinned, device):
        return
    for index in [given_index] if given_index else ["", pytorch_index]:
        found = offered(index, SECONDS_TO_ANSWER if index == pytorch_index else None)
        builds = [one for one in found if fits(one, pinned, device)]
        if builds:
            say(f"torch {builds[0]}: from {index or 'the package index'}")
            # The next installation brings what torch needs, in the versions of the constraints.
            return run_pip("--no-deps", *at(index), exactly(builds[0]))
    if device == "cuda" or given_index:
        raise SystemExit(
            f"{given_index or 'the package index'} has no build of torch {pinned} for "
            f"DEVICE={device}, or does not answer; set TORCH_INDEX_URL to an index that has one"
        )
    say(
        f"torch {pinned}: a CUDA build from the package index, because no index with a CPU build "
        "answers. It works on a CPU too, and is about 4 GB larger"
    )
    run_pip(f"torch=={pinned}")


def pinned_version() -> str:
    found = re.search(r"^torch==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert found, f"{CONSTRAINTS} has no line torch=="
    return found[1]


def installed_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def is_usable(build: str, pinned: str, device: str) -> bool:
    base, _, local = build.partition("+")
    return base == pinned and (device == "cpu" or local != "cpu")


def fits(build: str, pinned: str, device: str) -> bool:
    """Whether the build is made for the device: 2.13.0+cpu, or 2.13.0+cu130 and 2.13.0, the name of
    the CUDA build on the public index."""
    base, _, local = build.partition("+")
    is_made = local == "cpu" if device == "cpu" else local == "" or local.startswith("cu")
    return base == pinned and is_made


def offered(index: str, seconds: int | None) -> list[str]:
    """The versions of torch in an index, newest first; none if it does not answer."""
    asked = ["--timeout", str(seconds), "--retries", "0"] if seconds is not None else []
    command = [*PIP, "index", "versions", *asked, *at(index), "torch"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=None if seconds is None else LONGEST_LOOK_S,
        )
    except subprocess.TimeoutExpired:  # pip's timeout is that of each address and answer
        return []
    if done.returncode and seconds is None:
        sys.stderr.write(done.stderr)
    _, _, line = done.stdout.partition("Available versions: ")  # below it, what is installed
    return line.partition("\n")[0].split(", ")


def at(index: str) -> list[str]:
    return ["--index-url", index] if index else []


def exactly(build: str) -> str:
    """`torch==2.13.0` would also be met by, and prefer, 2.13.0+cpu."""
    return f"torch=={build}" if "+" in build else f"torch==={build}"


def run_pip(*arguments: str) -> None:
    command = [*PIP, "install", "--quiet", "--constraint", os.fspath(CONSTRAINTS), *arguments]
    if code := subprocess.run(command, check=False).returncode:
        raise SystemExit(code)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    device = sys.argv[1]
    install(device, PYTORCH_INDEX[device], os.environ.get("TORCH_INDEX_URL", ""))


if __name__ == "__main__":
    main()
