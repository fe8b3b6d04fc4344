"""Forwards library logs to structlog, so that uvicorn's tracebacks carry the request id."""

from __future__ import annotations

import logging

import structlog

_log = structlog.get_logger()


class StructlogHandler(logging.Handler):
    """Logs a library's record as an event, with the fields bound to the current request."""

    def emit(self, record: logging.LogRecord) -> None:
        _log.log(
            record.levelno,
            record.getMessage().strip(),
            logger=record.name,
            exc_info=record.exc_info or None,
        )


def forward_library_logs() -> None:
    """Forward warnings and errors, but not info: uvicorn only repeats our own start and stop."""
    logging.basicConfig(handlers=[StructlogHandler()], level=logging.WARNING, force=True)
