"""A text file that another process writes, read while it grows."""

from __future__ import annotations

from pathlib import Path


class GrowingFile:
    """Remembers how far it has read; a line that is still being written waits for its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0  # bytes, always just behind a newline

    def new_lines(self) -> list[str]:
        """The lines that were completed since the last call; none while there is no file."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        return data[:end].decode(errors="replace").splitlines()
