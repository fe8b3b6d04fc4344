"""Secrets with values that occur nowhere else, and where they are found."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.02
_LOOKS, _LATER = 20, 50
"""At each process: it may be a fork that has yet to run its command. Then at every 50th time."""


def planted(*names: str) -> dict[str, str]:
    """A value for each name."""
    return {name: f"planted-{name.lower().replace('_', '-')}-7f3a91" for name in names}


def leaks(texts: Iterable[tuple[str, bytes]], secrets: Mapping[str, str]) -> list[str]:
    """`place: name` of each secret that a text contains. Args: texts: by place"""
    return [
        f"{place}: {name}"
        for place, text in texts
        for name, value in secrets.items()
        if value.encode() in text
    ]


def files_below(directory: Path, skipped: Path | None = None) -> Iterator[tuple[str, bytes]]:
    """All of them, and their names. Args: skipped: a directory in it"""
    for path in sorted(directory.rglob("*")):
        if path.is_file() and (skipped is None or skipped not in path.parents):
            yield str(path.relative_to(directory)), str(path).encode() + path.read_bytes()


@contextmanager
def watched_command_lines() -> Iterator[Callable[[], list[tuple[str, bytes]]]]:
    """Yields the command lines of all processes that were seen since then, by program."""
    seen: set[bytes] = set()
    looks: Counter[str] = Counter()
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(_POLL_S):
            for pid in filter(str.isdecimal, os.listdir("/proc")):
                looks[pid] += 1
                if looks[pid] > _LOOKS and looks[pid] % _LATER:
                    continue
                try:
                    seen.add(Path("/proc", pid, "cmdline").read_bytes())
                except OSError:  # it has ended
                    continue

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lambda: [(line.partition(b"\0")[0].decode(), line) for line in sorted(seen)]
    finally:
        stop.set()
        thread.join()
