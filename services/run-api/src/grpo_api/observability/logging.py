"""What libraries log goes where our own events go: uvicorn's tracebacks carry the request id."""

from __future__ import annotations

import logging

import structlog

_log = structlog.get_logger()


class StructlogHandler(logging.Handler):
    """Hands a record on as an event, with what is bound to the request that it was logged in."""

    def emit(self, record: logging.LogRecord) -> None:
        _log.log(
            record.levelno,
            record.getMessage().strip(),
            logger=record.name,
            exc_info=record.exc_info or None,
        )


def forward_library_logs() -> None:
    """Warnings and worse; uvicorn's remarks on starting and stopping repeat our own."""
    logging.basicConfig(handlers=[StructlogHandler()], level=logging.WARNING, force=True)
