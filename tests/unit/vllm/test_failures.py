"""vLLM's processes log their errors and end: our name of the error stands before."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from logging.config import dictConfig

import pytest
from structlog.testing import capture_logs

from grpo_vllm.engine.vllm_compat import failures


@pytest.fixture
def engine_log() -> Iterator[logging.Logger]:
    """That of the process that vLLM starts for its engine, which configures logging again."""
    failures.name_logged_failures()
    dictConfig({"version": 1, "disable_existing_loggers": False, "loggers": {"vllm": {}}})
    yield logging.getLogger("vllm.v1.engine.core")
    for name in failures.LOGGERS:
        logging.getLogger(name).removeFilter(failures.name_failure)


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (
            ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_util"),
            ("OutOfMemory", "raise --gpu-memory-utilization"),
        ),
        (
            RuntimeError("CUDA out of memory occurred when warming up sampler with 1024 dummy req"),
            ("OutOfMemory", "lower --max-num-seqs"),
        ),
        (
            RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for `cuda"),
            ("GpuFailed", "The server starts another engine"),
        ),
        (RuntimeError("another error"), None),
    ],
)
def test_an_error_of_the_gpu_is_named(
    error: Exception, named: tuple[str, str] | None, engine_log: logging.Logger
) -> None:
    with capture_logs() as lines:
        try:
            raise error
        except (RuntimeError, ValueError):
            engine_log.exception("EngineCore failed to start.")
        engine_log.error("no traceback")
    if named is None:
        assert lines == []
    else:
        ((event, reason),) = [(line["event"], line["reason"]) for line in lines]
        assert event == named[0]
        assert named[1] in reason
