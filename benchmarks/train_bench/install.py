"""TRL from the package index, unmodified, in a Python environment of its own."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from grpo_tiny_model.model import default_cache_directory

TRL_SIDE = Path(__file__).with_name("trl_side.py")
PINS = Path(__file__).parents[2] / "requirements" / "trl.txt"


def trl_python() -> Path:
    """The interpreter of the cached environment, which is made on first use.

    Raises:
        subprocess.CalledProcessError: pip could not install the pins.
    """
    digest = hashlib.sha256(PINS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    target = default_cache_directory() / f"trl-{digest}"
    python = target / "bin" / "python"
    if not (target / "installed").exists():
        shutil.rmtree(target, ignore_errors=True)
        venv.create(target, with_pip=True, symlinks=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--requirement"]
        subprocess.run([*pip, str(PINS)], check=True)
        (target / "installed").touch()
    return python
