"""Runs the agent of a rollout: a program, or a Python function."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from pebble import ThreadPool

from grpo_core.own_code import where
from grpo_core.process import killed_with_parent
from grpo_core.settings.command import holds_secret
from grpo_core.tree.environment_values import PYTHON
from grpo_env.bridges.chat import MODEL
from grpo_env.sandbox import SERVICE_URL, Ended, Limits, chosen_sandbox
from grpo_env.sandbox.bubblewrap import SYSTEM
from grpo_env.sandbox.interface import MIB, Reason
from grpo_env.tasks import Row
from grpo_env.tasks.tools import contained, user_loop

ROW = "GRPO_ROW"
_ROOT = Path("/")  # all of the host
ON_HOST = "none"
"""The sandbox that is none."""
_LARGEST_VARIABLE_BYTES = 100_000
"""Linux refuses a variable of 128 KiB."""
_KEPT_OUTPUT_BYTES = 1 << 20
_LAST_LINES = 15


@dataclass(frozen=True)
class Client:
    """Where an agent reaches the policy, and the key that names its rollout.

    socket: the same server for programs that reach no network.
    """

    base_url: str
    api_key: str
    socket: Path
    model: str = MODEL

    def variables(self, base_url: str) -> dict[str, str]:
        """For a program that reaches the policy at this address."""
        return {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_BASE": base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_MODEL": self.model,
        }


@dataclass(frozen=True)
class AgentEnd:
    """output: what the agent printed or returned; problem: why its rollout failed; is_own: neither
    a limit of the program nor the machine ended it."""

    output: Any
    problem: str | None = None
    is_own: bool = True


class AgentProgram:
    """A program that is started for each rollout, in the sandbox that `--sandbox` chose.

    Args: command: as a shell divides it into words

    Raises:
        SandboxUnusable: the sandbox does not work here.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._sandbox = chosen_sandbox()
        self._words = command_words(command, self._sandbox.kind)

    def load(self) -> None:
        """Nothing: the sandbox of the constructor is all that it needs."""

    async def run(self, row: Row, client: Client, deadline_s: float) -> AgentEnd:
        text = json.dumps(row, default=str)
        ended = await self._ended(text, client, deadline_s)
        if ended.ok:
            return AgentEnd(ended.output)
        what = {
            "finished": f"ended with status {ended.status}",
            "timeout": f"did not end within {deadline_s:g} s, the limit of --agent-deadline-s",
        }.get(ended.reason, f"was ended by the limit {ended.reason} of the sandbox")
        # What it wrote to stderr, or else its output
        lines = (ended.errors.strip() or ended.output.strip()).splitlines()[-_LAST_LINES:]
        last_lines = "\n".join(lines)
        problem = f"the agent ({self._command}) {what}; its last lines:\n{last_lines}"
        is_killed = ended.status == 128 + signal.SIGKILL  # perhaps because memory ran out
        return AgentEnd(ended.output, problem, is_own=ended.reason == "finished" and not is_killed)

    async def _ended(self, text: str, client: Client, deadline_s: float) -> Ended:
        row = {ROW: text} if len(text) < _LARGEST_VARIABLE_BYTES else {}
        if self._sandbox.kind == ON_HOST:
            environment = {k: v for k, v in os.environ.items() if not holds_secret(k)}
            environment |= client.variables(client.base_url) | row
            return await run_program(self._words, text.encode(), environment, deadline_s)
        return await self._sandbox.run(
            program_words(self._words, self._sandbox.kind),
            stdin=text.encode(),
            environment=client.variables(f"{SERVICE_URL}/v1") | row,
            readable=readable_places(self._words, self._sandbox.kind),
            service=client.socket,
            # An agent may take its time, and imports large libraries.
            limits=Limits(
                seconds=deadline_s,
                cpu_s=math.ceil(deadline_s),
                memory_bytes=4096 * MIB,
                file_bytes=1024 * MIB,
                processes=512,
                open_files=1024,
                output_bytes=16 * MIB,
            ),
        )


def command_words(command: str, kind: str) -> list[str]:
    """`python` is this one: that of PATH may be a script of pyenv, whose files a sandbox hides. A
    container has its own."""
    words = shlex.split(command)
    is_own = words[0] in PYTHON and not kind.startswith("docker")
    return [sys.executable, *words[1:]] if is_own else words


def program_words(words: Sequence[str], kind: str) -> list[str]:
    """The words with whole paths, as the sandbox has another directory. A container has programs of
    its own."""
    program = words[0] if kind.startswith("docker") else shutil.which(words[0]) or words[0]
    rest = [str(Path(word).absolute()) if _is_path(word) else word for word in words[1:]]
    return [str(Path(program).absolute()) if "/" in program else program, *rest]


def readable_places(words: Sequence[str], kind: str) -> list[Path]:
    """What the program may read besides the system and this Python: the directories of the files
    that its command names, and the Python installation that runs it, unless it is a container's."""
    named = {Path(word).absolute() for word in words[1:] if _is_path(word)}
    found = {path if path.is_dir() or path.parent == _ROOT else path.parent for path in named}
    if not kind.startswith("docker"):
        found |= _places_of(Path(shutil.which(words[0]) or words[0]).absolute())
    present = (*map(Path, SYSTEM), Path("/dev"), Path("/proc"), Path(sys.prefix))
    found = {path for path in found if not any(map(path.is_relative_to, present))}
    return sorted(found - {_ROOT})


def _places_of(program: Path) -> set[Path]:
    """The Python installations that it belongs to, and the program itself unless one holds it."""
    pythons = {path.parent.parent for path in (program, program.with_name("python").resolve())}
    found = {prefix for prefix in pythons - {_ROOT} if any(prefix.glob("lib/python3*"))}
    return found if program.parent.parent in found else found | {program, program.resolve()}


def _is_path(word: str) -> bool:
    """Not a word such as `test` beside a directory of that name."""
    return ("/" in word or "." in word) and os.path.exists(word)


async def run_program(
    words: Sequence[str], given: bytes, environment: Mapping[str, str], deadline_s: float
) -> Ended:
    """Run a program on this machine, in this directory and in a process group of its own, which
    ends with it. Args: given: its stdin"""
    started = time.monotonic()
    with TemporaryFile() as stdin, TemporaryFile() as output, TemporaryFile() as errors:
        stdin.write(given)
        stdin.seek(0)
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=stdin,
            stdout=output,
            stderr=errors,
            env=environment,
            start_new_session=True,
            preexec_fn=killed_with_parent,
        )
        reason: Reason = "timeout"
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await process.wait()
                    reason = "finished"
        finally:
            # It may have left processes of its group, whose id is then still in use.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = await process.wait()
        status = 128 - code if code < 0 else code
        seconds = time.monotonic() - started
        return Ended(status, _end_of(output), _end_of(errors), reason, seconds)


def _end_of(file: BinaryIO) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _KEPT_OUTPUT_BYTES))
    return file.read().decode(errors="replace")


class AgentFunction:
    """A function `agent(row, client)`, or a coroutine function, that is called for each rollout in
    a thread of its own.

    Args:
        name: as the user wrote it
        find: finds the function
        rollouts: largest number of them at the same time
    """

    def __init__(self, name: str, find: Callable[[str], Callable[..., Any]], rollouts: int) -> None:
        self._name, self._rollouts = name, rollouts
        self._find = find
        # Daemons: a call that never ends does not keep the process alive.
        self._threads = ThreadPool(max_workers=rollouts)

    def load(self) -> None:
        """Raises `TaskUnusable` if it cannot be called."""
        assert callable(self._function)

    @cached_property
    def _function(self) -> Callable[..., Any]:
        # Not in the constructor: rewards run in processes that make the task again.
        return self._find(self._name)

    async def run(self, row: Row, client: Client, deadline_s: float) -> AgentEnd:
        call = partial(_called, self._function, row, client, deadline_s)
        done = self._threads.schedule(partial(contained, call))
        try:
            async with asyncio.timeout(deadline_s):
                return AgentEnd(await asyncio.wrap_future(done))
        except TimeoutError:
            what = f"did not end within {deadline_s:g} s, the limit of --agent-deadline-s"
            if done.cancelled():  # as only a call can be that has not begun
                what = (
                    f"did not begin: all threads (--agent-rollouts {self._rollouts}) have calls "
                    "that go on after their deadline; give what the agent calls a timeout"
                )
            return AgentEnd(None, f"the agent {self._name} {what}", is_own=False)
        except Exception as error:  # noqa: BLE001 - code of a user
            return AgentEnd(None, f"the agent {self._name} failed: {where(error)}")


Agent = AgentProgram | AgentFunction
"""Conducts rollouts: each `run` is one, which ends within the deadline."""


def _called(function: Callable[..., Any], row: Row, client: Client, deadline_s: float) -> Any:
    value = function(row, client)
    if not inspect.iscoroutine(value):
        return _as_json(value)
    in_time = asyncio.wait_for(value, deadline_s)
    return _as_json(asyncio.run_coroutine_threadsafe(in_time, user_loop()).result())


def _as_json(value: Any) -> Any:
    """Rewards run in processes that lack the classes of the agent's file."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise TypeError(f"it returned {type(value).__name__}, not values of JSON") from error
