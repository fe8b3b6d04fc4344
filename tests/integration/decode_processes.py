"""The processes that decode large submissions."""

from __future__ import annotations

import psutil


def decode_processes(parent: psutil.Process) -> list[psutil.Process]:
    """Those that `parent` started; resource trackers, which it starts as well, live on."""
    return [child for child in parent.children() if "spawn_main" in " ".join(command(child))]


def command(process: psutil.Process) -> list[str]:
    """Empty where it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # zombies are among them
        return []
