"""Reads a file of lines that grows, and notices that another one has replaced it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

_REMEMBERED_BYTES = 4096


class FollowedFile:
    """A resumed run rewrites its files. So each read compares the end of what was read before.

    Args:
        most_bytes: of a longer file, the first read skips the beginning
        offset: bytes to skip, which end with a newline
    """

    def __init__(self, path: Path, most_bytes: int | None = None, offset: int = 0) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._offset = offset
        self._last = b""
        self.number = 0
        """Of the newest line that was read, counted from 1."""

    def read(self, restart: Callable[[], None] = lambda: None) -> Iterator[bytes]:
        """Complete lines since the last call; none if the file cannot be read.

        Args: restart: called first if all earlier lines are to be forgotten
        """
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            file.seek(self._offset - len(self._last))
            if file.read(len(self._last)) != self._last:
                restart()
                self._offset, self._last, self.number = 0, b"", 0
                file.seek(0)
            if not self._offset and self._most_bytes is not None:
                self._offset = max(0, file.seek(0, 2) - self._most_bytes)
                file.seek(self._offset)
                if self._offset:
                    self._offset += len(file.readline())
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written
                self._offset += len(line)
                self._last = line[-_REMEMBERED_BYTES:]
                self.number += 1
                yield line

    def new_lines(self) -> list[str]:
        """The same, as text."""
        return b"".join(self.read()).decode(errors="replace").splitlines()
