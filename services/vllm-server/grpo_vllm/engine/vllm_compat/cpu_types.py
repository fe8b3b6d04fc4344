"""The data type of the weights on a CPU."""

from __future__ import annotations

import argparse

import structlog

from grpo_core.process.cpu_types import SLOW, is_slow_in_bfloat16

log = structlog.get_logger()


def use_fast_type(arguments: argparse.Namespace) -> None:
    """Make float32 the default on a CPU without instructions for bfloat16, which is what vLLM would
    take. Args: arguments: vLLM's parsed options"""
    if arguments.dtype == "auto" and is_slow_in_bfloat16():
        arguments.dtype = "float32"
        log.info("dtype.chosen", dtype="float32", reason=SLOW)
