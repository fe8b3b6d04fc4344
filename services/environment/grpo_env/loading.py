"""Finds a task by its name: a built-in one, a file, a module, an installed package or a bridge.

`problem_of` checks a name without running the task's code.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from grpo_core.errors import GrpoError
from grpo_core.own_code import load_file, problem_of_file, where
from grpo_core.tree.environment_values import (
    AGENT,
    BRIDGES,
    LEARNABLE,
    MIXTURE,
    UNIFORM,
    environment_name,
)
from grpo_env.tasks import Answer, Reward, Row, Task, TaskOptions
from grpo_env.tasks.curriculum import CurriculumUnusable, Rule, learnable
from grpo_env.tasks.reward_functions import as_reward
from grpo_env.tasks.tools import is_coroutine

BUILT_IN: Mapping[str, str] = {
    "arithmetic": "grpo_env.tasks.arithmetic:Arithmetic",
    "gsm8k": "grpo_env.tasks.gsm8k:Gsm8k",
    "math": "grpo_env.tasks.math:Math",
}
"""Name → class, which is imported only when it is used: checking a name needs no task."""
ENTRY_POINTS = "grpo.tasks"
DEFAULT_FUNCTION = "reward"
DEFAULT_RULE = "sampler"
AGENT_FUNCTION = "agent"
"""The function of `--agent my.py`."""


def short_name(task: str) -> str:
    """For metrics: `examples/my.py:reward` → `my`, `package.module:MyTask` → `module`."""
    source, _, attribute = task.partition(":")
    if source in BRIDGES:
        return environment_name(attribute)
    return Path(source).stem if source.endswith(".py") else source.rpartition(".")[2]


def problem_of(task: str) -> str | None:
    """Why there cannot be such a task; None if there may be one."""
    source, colon, _ = task.partition(":")
    if source.endswith(".py"):
        return problem_of_function(task, DEFAULT_FUNCTION)
    if colon or task in (*BUILT_IN, AGENT, MIXTURE):
        return None
    installed = [point.name for point in entry_points(group=ENTRY_POINTS)]
    return None if task in installed else _no_such_task(task, installed)


def problem_of_agent(name: str) -> str | None:
    """Why there cannot be such a function; None if there may be one."""
    source, _, attribute = name.partition(":")
    if attribute or source.endswith(".py"):
        return problem_of_function(name, AGENT_FUNCTION)
    return f"no function {name!r}; expected a file such as my.py:agent"


def problem_of_function(name: str, default: str) -> str | None:
    """Why the file of `my.py:name` cannot have such a function; None if it may, or names no file.
    Args: default: for `my.py`"""
    source, _, attribute = name.partition(":")
    if not source.endswith(".py"):
        return None
    return problem_of_file(Path(source).expanduser(), attribute or default)


def _no_such_task(name: str, installed: Iterable[str]) -> str:
    known = ", ".join([*BUILT_IN, AGENT, MIXTURE, *sorted(installed)])
    return (
        f"no task {name!r}; expected one of {known}, a file such as my.py:reward, a module such as "
        f"package.module:MyTask, or an environment: {', '.join(map('{}:…'.format, BRIDGES))}"
    )


class TaskUnusable(GrpoError):
    """The task does not exist, or its file cannot be loaded. The message names file and line."""


class FunctionTask(Task):
    """A task whose reward is a function of its own, and whose prompts are the rows of `--data`."""

    def __init__(self, name: str, function: Callable[..., Any], options: TaskOptions) -> None:
        self.name = name
        super().__init__(options)
        self.function = function
        self._reward = as_reward(function)

    def reward(self, answer: Answer, row: Row) -> Reward:
        reward: Reward = self._reward(answer, row)
        return reward

    @property
    def has_async_reward(self) -> bool:
        return is_coroutine(self._reward)


def find_rule(curriculum: str) -> Rule | None:
    """The rule of `--curriculum`; None for the plain order. Raises `CurriculumUnusable`: there is
    no such function, or its file cannot be loaded."""
    if curriculum in (UNIFORM, LEARNABLE):
        return learnable if curriculum == LEARNABLE else None
    try:
        found = _named(curriculum, DEFAULT_RULE)
    except TaskUnusable as error:
        raise CurriculumUnusable(f"--curriculum: {error}") from error
    if not callable(found):
        raise CurriculumUnusable(
            f"--curriculum: {curriculum} is {type(found).__name__}, no function (items, step)"
        )
    rule: Rule = found
    return rule


Make = Callable[[TaskOptions], Task]


def find_task(name: str) -> Make:
    """The function that makes the task of this name.

    Args:
        name: `gsm8k`; `my.py:reward` or `my.py:MyTask`; `package.module:MyTask`; the name of an
            entry point in the group `grpo.tasks`; `verifiers:ENVIRONMENT`.

    Raises:
        TaskUnusable: there is no such task, or its code cannot be loaded.
    """
    source, colon, attribute = BUILT_IN.get(name, name).partition(":")
    if name in BUILT_IN:
        task: Make = getattr(importlib.import_module(source), attribute)
        return task
    if source in BRIDGES and colon:
        return lambda options: _of_bridge(source, attribute, options)
    if name == AGENT:
        return _agent_task
    if colon or source.endswith(".py"):
        found = _named(name, DEFAULT_FUNCTION)
        return _task_of(found, attribute or DEFAULT_FUNCTION, short_name(name), source)
    return _installed(name)


def _of_bridge(bridge: str, environment: str, options: TaskOptions) -> Task:
    if bridge == "openenv":
        from grpo_env.bridges.openenv import OpenEnvTask

        return OpenEnvTask(options, environment)
    if bridge == "textarena":
        from grpo_env.bridges.textarena import TextArenaTask

        return TextArenaTask(environment, options)
    if bridge == "harbor":
        from grpo_env.bridges.harbor import HarborTask

        return HarborTask(environment, options)
    return verifiers_task(environment, options)


def verifiers_task(environment: str, options: TaskOptions) -> Task:
    """The task whose rollouts an environment of verifiers conducts and rates. Raises
    `EnvironmentUnusable`: verifiers or the environment is not installed, or cannot be used."""
    from grpo_env.bridges.verifiers import is_classic

    if is_classic(environment, options):
        from grpo_env.bridges.verifiers_classic import ClassicEnvironment

        return ClassicEnvironment(environment, options)
    from grpo_env.bridges.verifiers_v1 import V1Environment

    return V1Environment(environment, options)


def _agent_task(options: TaskOptions) -> Task:
    from grpo_env.bridges.agent import AgentArguments, AgentTask
    from grpo_env.bridges.agent_program import AgentFunction, AgentProgram

    if None in (options.args["reward"], options.args["command"] or options.args["function"]):
        raise TaskUnusable("the task agent needs a reward, and a command or a function")
    how, of_reward = AgentArguments.divided(options.args)
    rewards = find_task(how.reward)(replace(options, args=of_reward))
    if how.command is not None:
        return AgentTask(options, how, AgentProgram(how.command), rewards)
    agent = AgentFunction(how.function, _agent_function, how.rollouts)
    return AgentTask(options, how, agent, rewards)


def _agent_function(name: str) -> Callable[..., Any]:
    """Raises `TaskUnusable`."""
    function: Callable[..., Any] = _named(name, AGENT_FUNCTION)
    try:
        inspect.signature(function).bind({}, None)
    except TypeError as error:
        raise TaskUnusable(f"{name} cannot be called as agent(row, client): {error}") from error
    return function


def _named(name: str, default: str) -> Any:
    """What `my.py:reward` or `package.module:reward` names. Raises `TaskUnusable`."""
    source, _, attribute = name.partition(":")
    attribute, path = attribute or default, Path(source).expanduser()
    is_file = source.endswith(".py")
    if is_file and not path.is_file():
        raise TaskUnusable(f"{path}: no such file")
    try:
        if is_file:  # a file math.py must not take the place of Python's module
            module = load_file(path, f"grpo_task_{path.stem}")
        else:
            sys.path.insert(0, "")  # the directory that the command is started in
            module = importlib.import_module(source)
    except (Exception, SystemExit) as error:
        what = f"{path} cannot be loaded" if is_file else f"the module {source} cannot be imported"
        raise TaskUnusable(f"{what}: {where(error)}") from error
    found = getattr(module, attribute, None)
    if found is None:
        offered = [
            name
            for name, value in vars(module).items()
            if callable(value)
            and getattr(value, "__module__", None) == module.__name__
            and not name.startswith("_")
        ]
        raise TaskUnusable(
            f"{source} has no {attribute!r}; it defines {', '.join(offered) or 'no function'}"
        )
    return found


def _task_of(found: Any, attribute: str, stem: str, source: str) -> Make:
    if inspect.isclass(found):
        if not issubclass(found, Task):
            raise TaskUnusable(
                f"{source}: {attribute} is a class, but no subclass of grpo_env.tasks.Task"
            )
        return found
    if not callable(found):
        raise TaskUnusable(
            f"{source}: {attribute} is {type(found).__name__}, no function (answer, row) or Task"
        )
    try:
        inspect.signature(as_reward(found)).bind("", {})
    except TypeError as error:
        code = getattr(found, "__code__", None)
        line = f" line {code.co_firstlineno}" if code else ""
        raise TaskUnusable(
            f"{source}{line}: {attribute} cannot be called as {attribute}(answer, row): {error}"
        ) from error
    return lambda options: FunctionTask(stem, found, options)


def _installed(name: str) -> Make:
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        raise TaskUnusable(_no_such_task(name, found))
    try:
        loaded = found[name].load()
    except Exception as error:
        raise TaskUnusable(f"the task {name} cannot be loaded: {where(error)}") from error
    return _task_of(loaded, name, name, f"entry point {name}")


@dataclass(frozen=True)
class TaskSpec:
    """What a task is made of. `name`, `held_out`: replace the task's own; None: they do not."""

    source: str
    options: TaskOptions
    name: str | None = None
    held_out: float | None = None

    def make(self) -> Task:
        """Raises `TaskUnusable` if there is no such task or its code fails; its `GrpoError`s
        pass."""
        make = find_task(self.source)
        try:
            task = make(self.options)
        except GrpoError:
            raise
        except ValueError as error:
            raise TaskUnusable(str(error)) from error
        except Exception as error:
            raise TaskUnusable(f"task {self.source}: cannot be created: {where(error)}") from error
        if self.held_out is not None:
            task.held_out = self.held_out
        if self.name is not None:
            task.name = self.name
        return task


def specs_from(text: str) -> list[TaskSpec]:
    """Read a list of tasks as JSON."""
    specs = json.loads(text)
    return [TaskSpec(**spec | {"options": TaskOptions(**spec["options"])}) for spec in specs]
