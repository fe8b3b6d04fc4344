"""Names errors of GPUs in vLLM's processes, which only log them: the engine gets no cause."""

from __future__ import annotations

import logging

import structlog

from grpo_core.gpu import gpu_error

LESS_MEMORY = "lower --max-num-seqs, --max-model-len or --gpu-memory-utilization"
GOES_ON = "The server starts another engine; if that fails too, restart the server"
LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
"""Modules whose processes log the error that ends them."""


def log_failure(error: BaseException) -> bool:
    """Log the error by our name. False if it has none."""
    if (found := gpu_error(error, LESS_MEMORY, GOES_ON)) is not None:
        structlog.get_logger().error(type(found).__name__, reason=str(found))
    return found is not None


def name_logged_failures() -> None:
    """Log our name before each traceback that vLLM logs. Each of vLLM's processes needs this."""
    for name in LOGGERS:  # a filter stays when a new process of vLLM replaces all handlers
        logging.getLogger(name).addFilter(name_failure)


def name_failure(record: logging.LogRecord) -> bool:
    if record.exc_info and record.exc_info[1] is not None:
        log_failure(record.exc_info[1])
    return True
