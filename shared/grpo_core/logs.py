"""Configures structured logging: events with key=value fields on stderr."""

from __future__ import annotations

import errno
import io
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO, cast

import structlog
from structlog.types import Processor

EXIT_FAILED = 1


def configure_logging(
    service: str, level: str = "INFO", processors: Sequence[Processor] = ()
) -> None:
    """Log every event of this process to stderr, with UTC time and the service's name.

    Args: processors: further ones, which change events before they are written
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            *processors,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%Y-%m-%dT%H:%M:%S", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _WhereThereIsRoom(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)


@contextmanager
def ending_on(*failures: type[Exception]) -> Iterator[None]:
    """Log an error of these kinds by its name, and end this process with status 1."""
    try:
        yield
    except failures as error:
        structlog.get_logger().error(type(error).__name__, reason=str(error))
        raise SystemExit(EXIT_FAILED) from None


class _WhereThereIsRoom(io.TextIOBase):
    """A stream that loses what its full disk has no room for, as Python's `logging` does: no
    process ends because of its log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _on_a_full_disk():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _on_a_full_disk():
            self._stream.flush()


@contextmanager
def _on_a_full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
