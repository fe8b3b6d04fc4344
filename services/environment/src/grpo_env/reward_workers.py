"""Worker processes for rewards and tools: a call has a hard deadline, after which its process is
killed."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as DeadlinePassed
from multiprocessing import forkserver
from typing import Any

from pebble import ProcessExpired, ProcessPool

from grpo_core.process.closing import ClosesOnExit
from grpo_env import reward_process
from grpo_env.reward_process import TASKS_VARIABLE, Failure
from grpo_env.rollout.user_code import Elsewhere, TooSlow, UserCodeFailed
from grpo_env.tasks import Answer, Row, Task


class RewardWorkers(Elsewhere, ClosesOnExit):
    """Forks of a process that has loaded the tasks, and nothing else of this one: no threads, no
    locks, no GPU.

    Args:
        text: the tasks, as `assembly.specs_text` writes them
        count: of processes
        deadline_s: of one call
    """

    def __init__(self, text: str, count: int, deadline_s: float) -> None:
        self._text, self._count, self._deadline_s = text, count, deadline_s
        self._pool: ProcessPool | None = None
        self._starting = threading.Lock()

    async def reward(self, task: Task, answer: Answer, row: Row) -> Any:
        return await self._call("the reward", reward_process.reward, task.name, answer, row)

    async def tool(self, task: Task, name: str, arguments: Mapping[str, Any]) -> Any:
        what = f"the tool {name}"
        return await self._call(what, reward_process.tool, task.name, name, arguments)

    async def _call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        pool = self._pool
        if pool is None:  # the first call waits for the tasks to be loaded
            pool = await asyncio.to_thread(self._started)
        future = pool.schedule(function, args=(self._text, *arguments), timeout=self._deadline_s)
        try:
            value = await asyncio.wrap_future(future)
        except DeadlinePassed as error:
            raise TooSlow.after(what, self._deadline_s) from error
        except ProcessExpired as error:
            raise UserCodeFailed(
                "ProcessEnded", f"{what} ended its process with status {error.exitcode}"
            ) from error
        if isinstance(value, Failure):
            raise UserCodeFailed(value.kind, value.text, value.place, value.trace)
        return value

    def _started(self) -> ProcessPool:
        with self._starting:
            if self._pool is None:
                context = multiprocessing.get_context("forkserver")
                context.set_forkserver_preload([reward_process.__name__])
                os.environ[TASKS_VARIABLE] = self._text
                forkserver.ensure_running()
                del os.environ[TASKS_VARIABLE]
                pool = ProcessPool(self._count, context=context)
                assert pool.active  # starts the processes
                self._pool = pool
            return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.stop()  # type: ignore[no-untyped-call]
            self._pool.join()
