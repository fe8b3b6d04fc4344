"""The sandbox that `--sandbox` of `env-server` chooses for all its processes, and what runs Python
and shell code of a model in it.

For rewards and tools: functions that wait, and coroutines with the same arguments.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Unpack

from grpo_env.sandbox.bubblewrap import usable_bubblewrap
from grpo_env.sandbox.docker import DEFAULT_IMAGE, Docker, require_docker
from grpo_env.sandbox.host import OnHost
from grpo_env.sandbox.interface import Ended, Sandbox, SandboxOptions

VARIABLE = "GRPO_SANDBOX"
"""The chosen kind. Rewards and tools run in processes that inherit it."""
AUTO = "auto"


@cache
def sandbox_of(kind: str) -> Sandbox:
    """The sandbox of a kind: `auto`, `bubblewrap`, `docker`, `docker:IMAGE` or `none`.

    `auto` is bubblewrap.

    Raises:
        SandboxUnusable: it does not work here. The message says what to install or to allow.
        ValueError: there is no such kind.
    """
    name, _, image = kind.partition(":")
    if name == "docker":
        require_docker(image or DEFAULT_IMAGE)
        return Docker(image or DEFAULT_IMAGE)
    if kind == "none":
        return OnHost()
    if kind in (AUTO, "bubblewrap"):
        return usable_bubblewrap()
    raise ValueError(f"--sandbox {kind}: expected auto, bubblewrap, docker, docker:IMAGE or none")


def use_sandbox(kind: str) -> None:
    """Choose the sandbox of this process and of those that it starts. It is first tried when code
    runs."""
    os.environ[VARIABLE] = kind


def chosen_sandbox() -> Sandbox:
    """The sandbox that `--sandbox` chose. Raises as `sandbox_of`."""
    return sandbox_of(os.environ.get(VARIABLE, AUTO))


_READ_PROGRAM = """
import os, sys
left = int(sys.argv.pop())
code = b""
while len(code) < left:
    code += os.read(0, left - len(code))
exec(compile(code, "<program>", "exec"))
"""
"""Code comes before the program's input: an argument can hold no zero byte, and no 128 KiB."""
_LONGEST_ARGUMENT = 2**17 - 1


async def run_python_async(
    code: str, *, stdin: str = "", **options: Unpack[SandboxOptions]
) -> Ended:
    """Run a Python program. It has the packages of this environment. Raises `SandboxUnusable`: see
    `sandbox_of`."""
    sandbox = chosen_sandbox()
    program = code.encode(errors="replace")
    return await sandbox.run(
        [sandbox.python, "-c", _READ_PROGRAM, str(len(program))],
        stdin=program + stdin.encode(errors="replace"),
        **options,
    )


async def run_shell_async(
    command: str, *, stdin: str = "", **options: Unpack[SandboxOptions]
) -> Ended:
    """Run a command of the shell `sh`, without its zero bytes. Raises as `run_python_async`."""
    words = command.encode(errors="replace").replace(b"\0", b"")
    if len(words) > _LONGEST_ARGUMENT:
        return Ended(126, "", "sh: Argument list too long\n", "finished", 0.0)
    return await chosen_sandbox().run(
        ["sh", "-c", words.decode()],
        stdin=stdin.encode(errors="replace"),
        **options,
    )


def run_python(code: str, *, stdin: str = "", **options: Unpack[SandboxOptions]) -> Ended:
    """Do as `run_python_async`, and wait. Safe inside a running event loop, which it blocks."""
    return _wait(run_python_async(code, stdin=stdin, **options))


def run_shell(command: str, *, stdin: str = "", **options: Unpack[SandboxOptions]) -> Ended:
    """Do as `run_shell_async`, and wait. Safe inside a running event loop, which it blocks."""
    return _wait(run_shell_async(command, stdin=stdin, **options))


def _wait(work: Coroutine[Any, Any, Ended]) -> Ended:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, work).result()
