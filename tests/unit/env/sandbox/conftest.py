"""The sandbox of Debian's package `bubblewrap`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from grpo_env.sandbox import Ended, Sandbox, SandboxUnusable, sandbox_of


@cache
def _problem() -> str:
    try:
        sandbox_of("bubblewrap")
    except SandboxUnusable as error:
        return str(error)
    return ""


@pytest.fixture
def bubblewrap() -> Sandbox:
    if problem := _problem():
        pytest.skip(problem)
    return sandbox_of("bubblewrap")


@pytest.fixture
def python(bubblewrap: Sandbox) -> Callable[..., Ended]:
    """Runs a Python program in it."""

    def run(code: str, **options: Any) -> Ended:
        return asyncio.run(bubblewrap.run([bubblewrap.python, "-c", code], **options))

    return run
