"""Runs code that a model wrote, so that it reaches nothing of this machine. See `interface.py`."""

from grpo_env.sandbox.code import (
    chosen_sandbox,
    run_python,
    run_python_async,
    run_shell,
    run_shell_async,
    sandbox_of,
    use_sandbox,
)
from grpo_env.sandbox.interface import (
    SERVICE_URL,
    Ended,
    Limits,
    Sandbox,
    SandboxUnusable,
)

__all__ = [
    "SERVICE_URL",
    "Ended",
    "Limits",
    "Sandbox",
    "SandboxUnusable",
    "chosen_sandbox",
    "run_python",
    "run_python_async",
    "run_shell",
    "run_shell_async",
    "sandbox_of",
    "use_sandbox",
]
