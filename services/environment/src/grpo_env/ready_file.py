"""The file by which a health check sees that this environment works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_core.errors import GrpoError


class ReadyFileNotWritten(GrpoError):
    """The health check would wait for it for ever."""


@contextmanager
def ready_file(path: Path | None) -> Iterator[None]:
    """Keep the file there while the context is open; None: no file.

    Raises:
        ReadyFileNotWritten: it cannot be made.
    """
    if path is None:
        yield
        return
    try:
        path.touch()
    except OSError as error:
        raise ReadyFileNotWritten(
            f"--env.ready-file {path}: {error}; name a file that this user can write"
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
