"""Environments of verifiers before 0.4: a module with `load_environment`.

verifiers conducts the rollout and rates it. Its client is ours, so the policy answers through the
rollout's dialogue. verifiers counts an exception in a reward function as a reward of 0, so the
functions of the rubric are watched for exceptions.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from typing import Any

import datasets
import structlog
import verifiers
from verifiers.clients import OpenAIChatCompletionsClient
from verifiers.errors import OverlongPromptError
from verifiers.types import Response, ResponseMessage, ToolCall, Usage

from grpo_env.bridges import EnvironmentUnusable
from grpo_env.bridges.chat import MODEL, Chat, ChatAnswer, plain_message
from grpo_env.bridges.verifiers import VerifiersTask
from grpo_env.tasks import (
    ContextFull,
    Dialogue,
    Graded,
    Message,
    RolloutFailed,
    Row,
    Split,
    TaskOptions,
)

_errors: ContextVar[list[Exception] | None] = ContextVar("reward_errors", default=None)
"""Of the rollouts that the current task scores."""


@contextmanager
def raised_reward_errors() -> Iterator[None]:
    """Raise the first exception of a watched function that was called inside."""
    errors: list[Exception] = []
    token = _errors.set(errors)
    try:
        yield
    finally:
        _errors.reset(token)
    if errors:
        raise errors[0]


def watch(rubric: Any) -> None:
    """Let the functions of a rubric, and of all rubrics in it, report their exceptions to
    `raised_reward_errors`."""
    rubric.funcs[:] = [_watched(function, rubric) for function in rubric.funcs]
    for part in getattr(rubric, "rubrics", ()):
        watch(part)
    for environment in getattr(rubric, "env_map", {}).values():
        watch(environment.rubric)


def _watched(function: Callable[..., Any], rubric: Any) -> Callable[..., Any]:
    rates_a_group = rubric._is_group_func(function)

    # verifiers passes what the signature asks for, and inspect.signature() follows `wraps`.
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
            if inspect.isawaitable(value):
                value = await value
            return value if rates_a_group else float(value)
        except Exception as error:
            errors = _errors.get()
            if errors is not None:
                errors.append(error)
            raise

    return call


log = structlog.get_logger()

_PASSED_ON = frozenset({"max_tokens", "max_completion_tokens", "stop"})
_HARMLESS = frozenset({"n", "extra_body"})


class ClassicEnvironment(VerifiersTask):
    """An environment that `verifiers.load_environment` loads.

    rates_groups: whether reward functions rate the answers of a group together.

    Raises:
        EnvironmentUnusable: see there.
    """

    def __init__(self, env_id: str, options: TaskOptions) -> None:
        super().__init__(env_id, options)
        datasets.disable_progress_bars()
        with _unchanged_signal_handlers():
            self._env = _loaded(env_id, self.arguments)
        parts = [*_parts(self._env)]
        if any(part.provides_advantages for part in parts):
            raise EnvironmentUnusable(
                f"{env_id} computes advantages itself; use a rubric that returns rewards"
            )
        self.rates_groups = any(part.requires_group_rollouts for part in parts)
        self.tools = [
            {"type": "function", "function": tool.model_dump(exclude_none=True)}
            for tool in self._env.tool_defs or ()
        ]
        watch(self._env.rubric)
        sampling = self._env.sampling_args
        self._sampling = {name: sampling[name] for name in _PASSED_ON & sampling.keys()}
        if ignored := sampling.keys() - _PASSED_ON - _HARMLESS:
            log.warning("verifiers.sampling_ignored", environment=env_id, names=sorted(ignored))

    def rows(self, split: Split) -> Sequence[Row] | None:
        """The environment's data set; None if it has none for this split. Raises
        `EnvironmentUnusable`: there is no data set for training."""
        found = self._env.build_dataset() if split == "train" else self._env.build_eval_dataset()
        if found is None and split == "train":
            raise EnvironmentUnusable(
                f"the environment {self.env_id} has no data set for training (`dataset`), only one "
                "for evaluation; pick an argument of load_environment with --task-args that sets it"
            )
        return None if found is None else found.to_list()

    def prompt(self, row: Row) -> list[Message]:
        """Raises ValueError if the prompt holds images."""
        prompt = row["prompt"]
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        return [plain_message(message) for message in prompt]

    async def run(self, row: Row, dialogue: Dialogue) -> Graded:
        """Conduct one rollout and rate it.

        Raises:
            RolloutFailed: the environment ended the rollout with an error.
            Exception: of the environment's code, its reward functions included.
        """
        async with self._released() as begun:
            state = await self._rollout(row, dialogue, begun)
            with raised_reward_errors():
                await self._env.rubric.score_rollout(state)
            return _graded(state)

    async def run_group(self, row: Row, dialogues: Sequence[Dialogue]) -> list[Graded]:
        """Conduct and rate all rollouts of a group, as `run` does one."""
        async with self._released() as begun:
            rollouts = [
                asyncio.ensure_future(self._rollout(row, dialogue, begun)) for dialogue in dialogues
            ]
            try:
                states = await asyncio.gather(*rollouts)
            finally:
                for rollout in rollouts:
                    rollout.cancel()
            with raised_reward_errors():
                await self._env.rubric.score_group(states)
            return [_graded(state) for state in states]

    @asynccontextmanager
    async def _released(self) -> AsyncIterator[list[Any]]:
        """A list of states: the rubric releases what it holds for them, whatever fails inside."""
        states: list[Any] = []
        try:
            yield states
        finally:
            releases = (self._env.rubric.cleanup(state) for state in states)
            results = await asyncio.gather(*releases, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _rollout(self, row: Row, dialogue: Dialogue, begun: list[Any]) -> Any:
        chat = Chat(dialogue)
        client = _DialogueClient(chat)
        state = await self._env.rollout(dict(row), client, MODEL, self._sampling)
        begun.append(state)
        chat.finish()
        if error := state["error"]:
            raise RolloutFailed(f"{type(error).__name__}: {error}") from error
        return state


class _DialogueClient(OpenAIChatCompletionsClient):  # type: ignore[misc]
    """Answers the requests of one rollout. Its base class converts messages and tools."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(None)
        self._chat = chat

    async def get_response(
        self,
        prompt: Any,
        model: str,
        sampling_args: Mapping[str, Any],
        tools: Any = None,
        **_: Any,
    ) -> Any:
        """Answer as other clients of verifiers, but an error of the dialogue stays what it is."""
        messages, _ = await self.to_native_prompt(prompt)
        native_tools = await self.to_native_tools(tools)
        try:
            answer = await self._chat.complete(messages, native_tools or (), sampling_args)
        except ContextFull as error:
            raise OverlongPromptError(str(error)) from error
        return _response(answer, model)


def _response(answer: ChatAnswer, model: str) -> Any:
    calls = [ToolCall(id=call["id"], **call["function"]) for call in answer.tool_calls]
    usage = Usage(
        prompt_tokens=0,  # not known here; verifiers only reports it
        reasoning_tokens=0,
        completion_tokens=answer.completion_tokens,
        total_tokens=answer.completion_tokens,
    )
    message = ResponseMessage(
        content=answer.content,
        tool_calls=calls or None,
        finish_reason=answer.finish_reason,
        is_truncated=answer.finish_reason == "length",
    )
    return Response(id="", created=0, model=model, usage=usage, message=message)


def _graded(state: Mapping[str, Any]) -> Graded:
    reason = str(state.get("stop_condition") or "")
    return Graded(dict(state["metrics"] or {}), reason, score=float(state["reward"]))


def _loaded(env_id: str, arguments: Mapping[str, Any]) -> Any:
    try:
        found = verifiers.load_environment(env_id, **arguments)
    except (ValueError, RuntimeError, AttributeError) as error:
        raise EnvironmentUnusable(
            f"verifiers {version('verifiers')} cannot load the environment {env_id} with the "
            f"arguments {dict(arguments)}: {error.__cause__ or error}"
        ) from error
    if not isinstance(found, verifiers.Environment):
        raise EnvironmentUnusable(
            f"load_environment of {env_id} returned {type(found).__name__}; expected a "
            "verifiers.Environment"
        )
    return found


def _parts(env: Any) -> Iterator[Any]:
    """The environment and, if it is a group of environments, all of them."""
    yield env
    for part in getattr(env, "envs", ()):
        yield from _parts(part)


@contextmanager
def _unchanged_signal_handlers() -> Iterator[None]:
    """Environments set handlers that exit at once; env-server ends in order."""
    names = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(name) for name in names]
    try:
        yield
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)
