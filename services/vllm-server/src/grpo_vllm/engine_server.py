"""Builds vLLM's engine and its OpenAI application out of vLLM's own parts.

The server half of what `engine_internals` lists, apart because workers never need it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser

from grpo_vllm.engine_internals import current_platform

try:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ModuleNotFoundError:  # vLLM before 0.30
    from vllm.entrypoints.openai.api_server import (
        build_app,
        build_async_engine_client,
        init_app_state,
    )
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args


CPU_ENVIRONMENT = {
    # One engine process that also is the worker, forked: ready in 15 s instead of 23 s on two
    # cores, and half a gigabyte less.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}


def parse_engine_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """vLLM's own parsing of its own flags; a wrong one ends the process with status 2."""
    if current_platform.is_cpu():
        for variable, value in CPU_ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm-api-server"))
    parsed: argparse.Namespace = parser.parse_args(list(arguments))
    validate_parsed_serve_args(parsed)
    return parsed


def open_engine(arguments: argparse.Namespace) -> AbstractAsyncContextManager[Any]:
    """Start the engine's processes; leaving the context ends them."""
    engine: AbstractAsyncContextManager[Any] = build_async_engine_client(arguments)
    return engine


async def build_openai_app(engine: Any, arguments: argparse.Namespace) -> FastAPI:
    """vLLM's application with all of its routes, bound to `engine`."""
    tasks = await engine.get_supported_tasks()
    app: FastAPI = build_app(arguments, tasks, engine.model_config)
    await init_app_state(engine, app.state, arguments, tasks)
    return app
