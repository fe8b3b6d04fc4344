"""Configures structured logging: events with key=value fields on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import structlog
from structlog.types import Processor


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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
