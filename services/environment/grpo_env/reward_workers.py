"""Worker processes for rewards and tools: a call has a hard deadline, after which its process and
the programs that it started are ended."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as DeadlinePassed
from multiprocessing import forkserver
from typing import Any

import structlog
from pebble import ProcessExpired, ProcessPool

from grpo_core.process.closing import ClosesOnExit
from grpo_env import reward_process
from grpo_env.reward_process import TASKS_VARIABLE, Failure
from grpo_env.rollout.user_code import Elsewhere, TooSlow, UserCodeFailed
from grpo_env.tasks import Answer, Row, Task

log = structlog.get_logger()


class RewardWorkers(Elsewhere, ClosesOnExit):
    """Forks of a process that has loaded the tasks, and nothing else of this one: no threads, no
    locks, no GPU. Rewards and tools have processes of their own, because a step of a conversation
    must not wait for rewards.

    Args:
        text: the tasks, as `assembly.specs_text` writes them
        count: of processes, for each of both
        deadline_s: of one call
    """

    def __init__(self, text: str, count: int, deadline_s: float) -> None:
        self._rewards, self._tools = (_Workers(text, count, deadline_s) for _ in range(2))

    async def reward(self, task: Task, answer: Answer, row: Row) -> Any:
        arguments = (task.name, answer, row)
        return await self._rewards.call("the reward", reward_process.reward, *arguments)

    async def start_tools(self) -> None:
        await self._tools.started()

    async def tool(self, task: Task, name: str, arguments: Mapping[str, Any]) -> Any:
        what = f"the tool {name}"
        return await self._tools.call(what, reward_process.tool, task.name, name, arguments)

    def close(self) -> None:
        self._rewards.close()
        self._tools.close()


class _Workers:
    """Started with the first call. Args: as `RewardWorkers`"""

    def __init__(self, text: str, count: int, deadline_s: float) -> None:
        self._text, self._count, self._deadline_s = text, count, deadline_s
        self._pool: ProcessPool | None = None
        self._starting = threading.Lock()

    async def started(self) -> ProcessPool:
        """Wait until the tasks are loaded and the processes have started."""
        pool = self._pool
        return await asyncio.to_thread(self._started) if pool is None else pool

    async def call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        pool = await self.started()
        try:
            value = await self._run(pool, what, function, *arguments)
        except RuntimeError as error:
            # A process that ends between two calls breaks pebble's pool.
            log.warning("reward_workers.restarted", reason=str(error))
            await asyncio.to_thread(self._drop, pool)
            value = await self._run(await self.started(), what, function, *arguments)
        if isinstance(value, Failure):
            raise UserCodeFailed(value.kind, value.text, value.place, value.trace)
        return value

    async def _run(
        self, pool: ProcessPool, what: str, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        try:
            return await asyncio.wrap_future(
                pool.schedule(function, args=(self._text, *arguments), timeout=self._deadline_s)
            )
        except DeadlinePassed as error:
            raise TooSlow.after(what, self._deadline_s) from error
        except ProcessExpired as error:
            raise UserCodeFailed(
                "ProcessEnded", f"{what} ended its process with status {error.exitcode}"
            ) from error

    def _started(self) -> ProcessPool:
        with self._starting:
            if self._pool is None:
                _find_temporary_directory()
                context = multiprocessing.get_context("forkserver")
                context.set_forkserver_preload([reward_process.__name__])
                os.environ[TASKS_VARIABLE] = self._text
                forkserver.ensure_running()
                del os.environ[TASKS_VARIABLE]
                pool = ProcessPool(
                    self._count,
                    initializer=reward_process.begin,
                    initargs=(self._text,),
                    context=context,
                )
                assert pool.active  # starts the processes
                self._pool = pool
            return self._pool

    def _drop(self, pool: ProcessPool) -> None:
        """Stop a broken pool; the next call starts another one."""
        with self._starting:
            if self._pool is pool:
                self.close()
                self._pool = None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.stop()  # type: ignore[no-untyped-call]
            self._pool.join()


def _find_temporary_directory() -> None:
    """The processes meet at a socket in one. A container whose file system is read-only may have no
    other than that of shared memory, where their semaphores are anyway."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        tempfile.tempdir = "/dev/shm"
