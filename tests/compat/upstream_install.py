"""Packages from the index, unmodified, each in a Python environment of its own."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo_tiny_model.model import default_cache_directory

PINS = Path(__file__).parents[2] / "requirements" / "atroposlib.txt"
PIP_DEADLINE_S = 300
NOT_ON_ANY_INDEX = "(from versions: none)"
"""How pip ends when no index answers, or none that does has the package."""


class InstallFailed(Exception):
    """pip could not install the pins; its words are in the message."""


class NoPackageIndex(InstallFailed):
    """No index that pip is configured for offers the pins."""


@dataclass(frozen=True)
class Upstream:
    """`python` runs atroposlib's environments; `wheel` holds the unpacked wheel, nothing else."""

    python: Path
    wheel: Path


def ensure_upstream(cache: Path | None = None, pins: Path = PINS) -> Upstream:
    """Return the cached installation of atroposlib's `pins`. See `ensure_python`."""
    return _at(_ensured(pins, _install_with_wheel, cache))


def ensure_python(pins: Path, cache: Path | None = None) -> Path:
    """Return the interpreter of the cached installation of `pins`, making it on first use.

    Safe to call from several processes at once: it is made beside its final place and renamed,
    and whoever comes second finds it there.

    Raises:
        InstallFailed, NoPackageIndex: nothing was left behind.
    """
    return _at(_ensured(pins, _install, cache)).python


def _ensured(pins: Path, install: Callable[[Path, Path], None], cache: Path | None) -> Path:
    target = (cache or default_cache_directory()) / f"{pins.stem}-{_digest(pins)}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            install(staging, pins)
            staging.rename(target)
        except OSError:
            if not target.exists():
                raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


def _at(directory: Path) -> Upstream:
    return Upstream(directory / "venv" / "bin" / "python", directory / "wheel")


def _digest(pins: Path) -> str:
    """Of everything that decides what is installed, and of the interpreter it is linked to."""
    parts = (pins.read_bytes(), sys.version.encode(), sys.base_prefix.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _install(directory: Path, pins: Path) -> None:
    made = _at(directory)
    # Only `bin/python -m` is used later: scripts in bin/ would name the place before the rename.
    venv.create(directory / "venv", symlinks=True)
    _pip("--python", str(made.python), "install", "--requirement", str(pins))


def _install_with_wheel(directory: Path, pins: Path) -> None:
    _install(directory, pins)
    (wheel,) = (line for line in pins.read_text().splitlines() if line.startswith("atroposlib=="))
    _pip("install", "--target", str(_at(directory).wheel), wheel)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    # Most of the bytecode would never be used, and compiling it takes longer than the installing.
    command += ["--no-deps", "--no-compile"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_DEADLINE_S)
    if done.returncode != 0:
        kind = NoPackageIndex if NOT_ON_ANY_INDEX in done.stderr else InstallFailed
        raise kind(f"{' '.join(command)}\n{done.stderr}")
