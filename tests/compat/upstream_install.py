"""Packages from the index, unmodified, each in a Python environment of its own."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

from grpo_tiny_model.model import default_cache_directory

PINS = Path(__file__).parents[2] / "requirements" / "atroposlib.txt"
PIP_DEADLINE_S = 300
NOT_ON_ANY_INDEX = "(from versions: none)"
"""How pip ends when no index answers, or none that does has the package."""


class NoPackageIndex(Exception):
    """No index that pip is configured for offers the pins."""


@dataclass(frozen=True)
class Upstream:
    """`python` runs the packages; `wheel` holds the unpacked wheel of atroposlib, nothing else."""

    python: Path
    wheel: Path


def ensure_upstream(pins: Path = PINS) -> Upstream:
    """Return the cached installation of `pins`, making it on first use.

    Safe to call from several processes at once: it is made beside its final place and renamed,
    and whoever comes second finds it there.

    Raises:
        NoPackageIndex, RuntimeError: nothing was left behind.
    """
    target = default_cache_directory() / f"{pins.stem}-{_digest(pins)}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            _install(_at(staging), pins)
            staging.rename(target)
        except OSError:
            if not target.exists():
                raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return _at(target)


def ensure_wheel(requirement: str) -> Path:
    """The unpacked wheel of one package without what it requires, cached: a place for PYTHONPATH.

    Raises:
        NoPackageIndex, RuntimeError: nothing was left behind.
    """
    target = default_cache_directory() / f"wheel-{requirement}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            _pip("install", "--target", str(staging), requirement)
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


def _install(made: Upstream, pins: Path) -> None:
    # Only `bin/python -m` is used later: scripts in bin/ would name the place before the rename.
    venv.create(made.python.parents[1], symlinks=True)
    _pip("--python", str(made.python), "install", "--requirement", str(pins))
    for line in pins.read_text().splitlines():
        if line.startswith("atroposlib=="):
            _pip("install", "--target", str(made.wheel), line)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    # Most of the bytecode would never be used, and compiling it takes longer than the installing.
    command += ["--no-deps", "--no-compile"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_DEADLINE_S)
    if done.returncode != 0:
        kind = NoPackageIndex if NOT_ON_ANY_INDEX in done.stderr else RuntimeError
        raise kind(f"{' '.join(command)}\n{done.stderr}")
