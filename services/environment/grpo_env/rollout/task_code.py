"""Calls the code of a task: outside the event loop, several calls side by side, with a deadline.

Rewards and tools run in worker processes, where the deadline of a call is hard: after it, its
process and the programs that it started are ended. The code of a user may hold the interpreter's
lock for minutes, for example in a slow regular expression, or end its process: that must be another
process than the one that serves the run. There it runs in the main thread, as `signal.alarm` needs
it. What the workers run is at the end of this file, which they import.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import multiprocessing
import os
import pickle
import signal
import sys
import sysconfig
import tempfile
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as DeadlinePassed
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import structlog
from pebble import ProcessExpired, ProcessPool, ThreadPool

from grpo_core.closing import ClosesOnExit
from grpo_core.errors import GrpoError
from grpo_core.process import end_with_parent
from grpo_env.failures import RolloutFailed, is_of_machine
from grpo_env.loading import specs_from
from grpo_env.tasks import Answer, Message, Row, State, Task
from grpo_env.tasks.reward_functions import graded_of
from grpo_env.tasks.tools import CALL_IN_PROCESS, contained, contained_await, user_loop

log = structlog.get_logger()

T = TypeVar("T")
TASKS_VARIABLE = "GRPO_REWARD_TASKS"
"""Holds the tasks to load while the process that forks the workers starts."""
_OF_OTHERS = (
    "<frozen",
    str(Path(__file__).parents[1]),
    str(Path(__file__).parents[3] / "runs" / "grpo_runs"),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)
"""How the names of files begin that are not the user's."""
_THREADS = 64
_MOST_WAITS = 10


class UserCodeFailed(Exception):
    """An error of a task's code, which other processes can read.

    kind: name of the error; place: the user's line that raised it; trace: its traceback, from the
    user's first line on; of_machine: see `is_of_machine`.
    """

    def __init__(
        self, kind: str, text: str, place: str = "", trace: str = "", of_machine: bool = False
    ) -> None:
        super().__init__(kind, text, place, trace, of_machine)
        self.kind, self.text, self.place, self.trace = kind, text, place, trace
        self.of_machine = of_machine

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, error: BaseException) -> UserCodeFailed:
        if isinstance(error, UserCodeFailed):
            return error
        shown = error.__traceback__
        while shown is not None and not _is_own(shown.tb_frame.f_code.co_filename):
            shown = shown.tb_next
        own = [frame for frame in traceback.extract_tb(shown) if _is_own(frame.filename)]
        place = f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""
        trace = traceback.format_exception(type(error), error, shown or error.__traceback__)
        kind, of_machine = type(error).__name__, is_of_machine(error)
        return cls(kind, str(error), place, "".join(trace).rstrip(), of_machine)


def _is_own(file: str) -> bool:
    return not file.startswith(_OF_OTHERS)


class TooSlow(ValueError):
    """The code of a task did not end within its deadline."""

    @classmethod
    def after(cls, name: str, deadline_s: float) -> Self:
        return cls(
            f"{name} did not end within {deadline_s:g} s; make it faster, load at import what it "
            "needs, or raise --reward-deadline-s"
        )


class TaskCode(ClosesOnExit):
    """Rewards and tools run in worker processes. What needs the state of this process, such as a
    step of a conversation, runs here: functions in threads, coroutines in `user_loop`. Rewards and
    tools have processes of their own, because a step must not wait for rewards.

    The threads are daemons: a call that never ends does not keep the process alive.

    Args:
        deadline_s: of one call
        workers: number of processes, for each of both; 0: all code runs here
        tasks: those that the processes load, as `loading.specs_from` reads them
    """

    def __init__(self, deadline_s: float, workers: int = 0, tasks: str = "") -> None:
        self._deadline_s = deadline_s
        self._rewards, self._tools = (
            WorkerProcesses(tasks, workers, deadline_s) if workers else None for _ in range(2)
        )
        self._threads = ThreadPool(max_workers=_THREADS)
        self._awaited: set[Future[Any]] = set()

    async def reward(self, task: Task, answer: Answer, row: Row) -> Any:
        """What the task's reward returns. Raises as `call`, and as `WorkerProcesses.call`."""
        if not task.blocks:
            return await self.call_here("the reward", task.reward, answer, row)
        is_here = task.has_async_reward or task.has_steps or task.has_process
        if self._rewards is None or is_here:
            return await self.call("the reward", task.reward, answer, row)
        arguments = (task.name, answer, row)
        return await self._rewards.call("the reward", reward_in_worker, *arguments)

    async def step(self, task: Task, state: State, answer: Answer) -> Sequence[Message] | None:
        """The task's next messages, see `Task.step`. Its tools run in other processes, unless a
        step of its own calls them. Raises as `call`."""
        call = self.call if task.blocks else self.call_here
        if (processes := self._tools) is not None and task.tools and not task.has_steps:
            await processes.started()

            async def call_tool(name: str, arguments: Mapping[str, Any]) -> Any:
                what = f"the tool {name}"
                return await processes.call(what, tool_in_worker, task.name, name, arguments)

            CALL_IN_PROCESS.set(call_tool)
        more: Sequence[Message] | None = await call("the step", task.step, state, answer)
        return more

    async def call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's value; if that is awaitable, what it yields.

        Raises:
            TooSlow: the deadline has passed. A function goes on in its thread; a coroutine is
                cancelled.
            Exception: any error of the function.
        """
        if inspect.iscoroutinefunction(function):
            return await self._in_time(name, self._in_loop(function(*arguments)))
        value = await self._in_thread(name, function, *arguments)
        if inspect.isawaitable(value):
            return await self._in_time(name, self._in_loop(value))
        return value

    async def call_here(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call it in this event loop, else as `call`: for code that never blocks the loop."""
        value = contained(function, *arguments)
        if not inspect.isawaitable(value):
            return value
        return await self._in_time(name, contained_await(value))

    async def _in_thread(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        loop, started = asyncio.get_running_loop(), asyncio.Event()

        def work() -> Any:
            loop.call_soon_threadsafe(started.set)
            return contained(function, *arguments)

        value = asyncio.wrap_future(self._threads.schedule(work))
        try:
            # Many rewards may wait for a thread: that is not the time of this one.
            async with asyncio.timeout(_MOST_WAITS * self._deadline_s):
                await started.wait()
        except TimeoutError as error:
            raise TooSlow(f"{name} found no free thread: earlier calls have not ended") from error
        return await self._in_time(name, value)

    async def _in_time(self, name: str, work: Awaitable[Any]) -> Any:
        me = asyncio.current_task()
        try:
            async with asyncio.timeout(self._deadline_s) as limit:
                return await work
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TooSlow.after(name, self._deadline_s) from error
        except asyncio.CancelledError as error:
            if me is None or me.cancelling():
                raise
            raise RuntimeError(f"{name} cancelled itself") from error  # code of a user

    async def _in_loop(self, work: Awaitable[Any]) -> Any:
        async def run() -> Any:
            return await work

        # A coroutine is scheduled as it is: one that is cancelled before it begins is then closed.
        begun = work if inspect.iscoroutine(work) else run()
        done = asyncio.run_coroutine_threadsafe(begun, user_loop())
        self._awaited.add(done)
        done.add_done_callback(self._awaited.discard)
        return await contained_await(asyncio.wrap_future(done))

    def close(self) -> None:
        for awaited in [*self._awaited]:
            awaited.cancel()
        self._threads.close()  # type: ignore[no-untyped-call]
        # Its threads end without a wait for them here: a call may never end.
        threading.Thread(target=self._threads.join, daemon=True).start()
        for processes in (self._rewards, self._tools):
            if processes is not None:
                processes.close()


class WorkerProcesses:
    """Forks of a process that has loaded the tasks, and nothing else of this one: no threads, no
    locks, no GPU. They start with the first call. Args: as `TaskCode`"""

    def __init__(self, tasks: str, count: int, deadline_s: float) -> None:
        self._tasks, self._count, self._deadline_s = tasks, count, deadline_s
        self._pool: ProcessPool | None = None
        self._starting = threading.Lock()

    async def started(self) -> ProcessPool:
        """Wait until the tasks are loaded and the processes have started."""
        pool = self._pool
        return await asyncio.to_thread(self._started) if pool is None else pool

    async def call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `reward_in_worker` or `tool_in_worker` returns.

        Raises:
            TooSlow: the deadline has passed, and the call was ended.
            UserCodeFailed: the code raised an error, or ended its process.
            RolloutFailed: no process could be started for it.
            GrpoError: as the code raised it.
        """

        def run(pool: ProcessPool) -> Awaitable[Any]:
            given = (self._tasks, *arguments)
            return asyncio.wrap_future(pool.schedule(function, given, timeout=self._deadline_s))

        pool = await self.started()
        try:
            try:
                value = await run(pool)
            except RuntimeError as error:
                # A process that ends between two calls breaks pebble's pool.
                log.warning("reward_workers.restarted", reason=str(error))
                await asyncio.to_thread(self._drop, pool)
                try:
                    value = await run(await self.started())
                except RuntimeError as again:
                    raise RolloutFailed(f"{what} found no process: {again}") from again
        except DeadlinePassed as error:
            raise TooSlow.after(what, self._deadline_s) from error
        except ProcessExpired as error:
            # Code seldom kills its own process; the kernel does, when memory runs out.
            raise UserCodeFailed(
                "ProcessEnded",
                f"{what} ended its process with status {error.exitcode}",
                of_machine=error.exitcode == -signal.SIGKILL,
            ) from error
        if isinstance(value, UserCodeFailed):
            raise value
        return value

    def _started(self) -> ProcessPool:
        with self._starting:
            if self._pool is None:
                try:  # the processes meet at a socket in it
                    tempfile.gettempdir()
                except FileNotFoundError:
                    # A container whose file system is read-only may have no other than that of
                    # shared memory, where their semaphores are anyway.
                    tempfile.tempdir = "/dev/shm"
                context = multiprocessing.get_context("forkserver")
                context.set_forkserver_preload([__name__])
                os.environ[TASKS_VARIABLE] = self._tasks
                forkserver.ensure_running()
                del os.environ[TASKS_VARIABLE]
                pool = ProcessPool(
                    self._count,
                    initializer=begin_worker,
                    initargs=(self._tasks,),
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


class _Loaded:
    text = ""
    tasks: Mapping[str, Task]


def load(text: str) -> None:
    """Make the tasks that `specs_from` reads from the text. Raises the errors of their code."""
    if text != _Loaded.text:
        tasks = [spec.make() for spec in specs_from(text)]
        _Loaded.tasks, _Loaded.text = {task.name: task for task in tasks}, text


def begin_worker(text: str) -> None:
    """Prepare a worker, outside the deadline of any call. An error of the tasks' code is raised
    again by the first call."""
    os.setsid()  # the programs that a call starts end with it
    end_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    with contextlib.suppress(Exception):
        contained(load, text)


def reward_in_worker(text: str, task: str, answer: Answer, row: Row) -> Any:
    """What the task's reward returns, as `graded_of` reads it here, where its libraries are
    imported; or a `UserCodeFailed`. Raises `GrpoError` as the reward does."""
    return _outcome(text, lambda: _Loaded.tasks[task].reward(answer, row), graded_of)


def tool_in_worker(text: str, task: str, name: str, arguments: Mapping[str, Any]) -> Any:
    """What the tool returns, or a `UserCodeFailed`."""

    def call() -> Any:
        for function in _Loaded.tasks[task].tools:
            if callable(function) and function.__name__ == name:
                return function(**arguments)
        raise LookupError(name)

    return _outcome(text, call, lambda value: value)


def _outcome(text: str, call: Callable[[], Any], read: Callable[[Any], Any]) -> Any:
    try:
        contained(load, text)
        value = contained(call)
        if inspect.isawaitable(value):
            value = contained(_loop().run_until_complete, contained_await(value))
        return _portable(read(value))
    except GrpoError as error:
        raise _portable(error) from None
    except Exception as error:  # noqa: BLE001 - code of a user
        return UserCodeFailed.of(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # it would end this process later


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Of the coroutines that functions return here; in the main thread, as all code."""
    return asyncio.new_event_loop()


def _portable(value: T) -> T:
    """The value, which another process can read: any other one would break the pool. Raises the
    errors of pickle."""
    pickle.loads(pickle.dumps(value))
    return value


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The error of a worker that does not start; nothing if the environment ended meanwhile."""
    if not issubclass(kind, FileNotFoundError | ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


if _text := os.environ.pop(TASKS_VARIABLE, ""):
    sys.excepthook = _say
    # Printed already when the environment loaded the task. An error is raised again in a worker.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(BaseException):
        load(_text)
