"""Runs code that a model wrote, so that it reaches nothing of this machine. See `interface.py`."""

from grpo_env.sandbox.code import chosen_sandbox as chosen_sandbox
from grpo_env.sandbox.code import run_python as run_python
from grpo_env.sandbox.code import run_python_async as run_python_async
from grpo_env.sandbox.code import run_shell as run_shell
from grpo_env.sandbox.code import run_shell_async as run_shell_async
from grpo_env.sandbox.code import sandbox_of as sandbox_of
from grpo_env.sandbox.code import use_sandbox as use_sandbox
from grpo_env.sandbox.interface import SERVICE_URL as SERVICE_URL
from grpo_env.sandbox.interface import Ended as Ended
from grpo_env.sandbox.interface import Limits as Limits
from grpo_env.sandbox.interface import Sandbox as Sandbox
from grpo_env.sandbox.interface import SandboxFailed as SandboxFailed
from grpo_env.sandbox.interface import SandboxUnusable as SandboxUnusable
