"""Tools that the model may call: their schemas, and the answers to calls in a message.

`contained` calls code of a user or of a model, and lets no error of it out that is none of
`Exception`, or that a future cannot hold.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

from pebble import ThreadPool

from grpo_core.errors import GrpoError
from grpo_env.failures import RolloutFailed, is_of_machine
from grpo_env.tasks.tool_calls import IsText, Message, ToolCall, text_parameters, tool_calls


@contextmanager
def hidden_torch() -> Iterator[None]:
    """While transformers is imported, which otherwise imports torch wherever it is installed: 5 s
    of a core and 340 MB for each environment, whose tokenizer needs none."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # which says that it is missing
    # A transformers that was imported with torch cannot go on without it.
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's sign for "not to be found"
    try:
        yield
    finally:
        del sys.modules["torch"]  # what looks for it later, as datasets does, may find it


ESCAPING = (StopIteration, StopAsyncIteration, SystemExit, KeyboardInterrupt)
"""A future cannot hold the first two: whoever waits for it would wait for ever. The others would
end this process, for example if a program that a model wrote calls `exit()`."""


class CodeStopped(RuntimeError):
    """The code raised one of `ESCAPING`."""

    def __init__(self, error: BaseException) -> None:
        detail = f": {error}" if str(error) not in ("", "None") else ""
        super().__init__(f"{type(error).__name__}{detail}")


def contained(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    """The function's value. Raises `CodeStopped`, and any `Exception` of the function."""
    try:
        return function(*arguments, **options)
    except ESCAPING as error:
        raise CodeStopped(error) from error


async def contained_await(work: Awaitable[Any]) -> Any:
    """What `work` yields. Raises as `contained`."""
    try:
        return await work
    except ESCAPING as error:
        raise CodeStopped(error) from error


@cache
def user_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all coroutines of the user's code, in a daemon thread: a client that a file
    opens once belongs to one loop."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            with suppress(SystemExit, KeyboardInterrupt):  # of a coroutine; its caller gets it too
                loop.run_forever()

    threading.Thread(target=run, name="user_loop", daemon=True).start()
    return loop


def is_coroutine(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: also an object with such a `__call__`."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


Tool = Callable[..., Any] | Mapping[str, Any]

_threads = ThreadPool(max_workers=32)  # they start with the first call
CALL_IN_PROCESS: ContextVar[Callable[[str, Mapping[str, Any]], Awaitable[Any]] | None] = ContextVar(
    "CALL_IN_PROCESS", default=None
)
"""Calls a tool of the task in another process, by name; None: tools run in threads."""


class ToolUnusable(GrpoError):
    """A tool has no docstring or no types, so no schema can be made of it."""


def tool_schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """JSON schemas for the chat template. A function's schema is made of its types and of its
    docstring in Google's style; a mapping is a schema already.

    Raises:
        ToolUnusable: a function lacks a docstring, or the type or description of an argument.
    """
    return [dict(tool) if isinstance(tool, Mapping) else _schema(tool) for tool in tools]


async def answer_calls(text: str, tools: Sequence[Tool]) -> list[Message] | None:
    """Call the tools that a message calls; None if it calls none.

    Returns one message of the role `tool` for each call. An error of a tool becomes its content, so
    that the model can learn from it. Functions run in threads; coroutines are awaited.

    Raises:
        RolloutFailed: a tool raised it, or `is_of_machine` its error.
        GrpoError: of a tool.
    """
    calls = tool_calls(text, _is_text(tools))
    functions = {tool.__name__: tool for tool in tools if not isinstance(tool, Mapping)}
    answers = await asyncio.gather(*(_answer(call, functions) for call in calls))
    messages: list[Message] = [
        {"role": "tool", "name": call.name, "content": answer}
        for call, answer in zip(calls, answers, strict=True)
    ]
    return messages or None


async def _answer(call: ToolCall, functions: Mapping[str, Callable[..., Any]]) -> str:
    if call.error is not None:
        return f"error: {call.error}"
    tool = functions.get(call.name)
    if tool is None:
        return f"error: no tool {call.name!r}; the tools are {', '.join(functions)}"
    try:
        inspect.signature(tool).bind(**call.arguments)
        call_in_process = CALL_IN_PROCESS.get()
        # A coroutine, a method or a closure needs the state of this process.
        is_stateless = inspect.isfunction(tool) and not is_coroutine(tool) and not tool.__closure__
        if call_in_process is not None and is_stateless:
            return str(await call_in_process(call.name, call.arguments))
        if is_coroutine(tool):
            return str(await contained_await(tool(**call.arguments)))
        # Daemon threads: a tool that never ends does not keep the process alive.
        # A partial: an argument of the tool may have the name of one of pebble's.
        done = _threads.schedule(partial(contained, tool, **call.arguments))
        return str(await asyncio.wrap_future(done))
    except GrpoError:
        raise
    except Exception as error:  # code of a user, and arguments of a model
        if is_of_machine(error):
            raise RolloutFailed(f"the tool {call.name}: {type(error).__name__}: {error}") from error
        return f"error: {error or type(error).__name__}"


def _is_text(tools: Sequence[Tool]) -> IsText:
    """Reads the tools' schemas only if a call asks: most are JSON."""

    @cache
    def of_schemas() -> IsText:
        return text_parameters(tool_schemas(tools))

    return lambda *call: of_schemas()(*call)


def _schema(tool: Callable[..., Any]) -> dict[str, Any]:
    with hidden_torch():
        from transformers.utils.chat_template_utils import (
            DocstringParsingException,
            TypeHintParsingException,
            get_json_schema,
        )
    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except (DocstringParsingException, TypeHintParsingException) as error:
        code = getattr(tool, "__code__", None)
        place = f" ({code.co_filename} line {code.co_firstlineno})" if code else ""
        raise ToolUnusable(
            f"the tool {getattr(tool, '__name__', tool)}{place} has no schema: {error}; give each "
            "argument a type, and describe it in the docstring below 'Args:'"
        ) from error
    return schema
