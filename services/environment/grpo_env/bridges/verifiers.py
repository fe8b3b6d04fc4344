"""Environments of the library verifiers as tasks.

https://github.com/PrimeIntellect-ai/verifiers
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType

from grpo_core.own_code import where
from grpo_env.bridges import DATA_OPTIONS, EnvironmentUnusable, refuse_options
from grpo_env.tasks import Task, TaskOptions

_INSTALL = "docs/how-to/verifiers.md shows how to install it"
_FIRST_V1 = (0, 4)
_OLDEST = (0, 2)
_MAX_SEQUENCES = "max_sequences"
"""The only argument of `--task-args` that an environment of verifiers does not get."""


class VerifiersTask(Task):
    """Lets verifiers conduct and rate the rollouts of an environment.

    The parts of the reward are verifiers' reward functions and metrics; the score is verifiers'
    reward.

    env_id: verifiers' name of the environment; arguments: those that it gets.
    """

    drives_itself = True
    blocks = False

    def __init__(self, env_id: str, options: TaskOptions) -> None:
        self.name = self.env_id = env_id
        super().__init__(options)
        self.arguments = dict(options.args)
        self.max_sequences = int(self.arguments.pop(_MAX_SEQUENCES, self.max_sequences))


def is_classic(env_id: str, options: TaskOptions) -> bool:
    """Whether an environment is one of verifiers before 0.4.

    Args:
        env_id: as verifiers names the environment: `my-env`, or `owner/my-env` of its hub

    Raises:
        EnvironmentUnusable: verifiers or the environment is not installed, or cannot be used.
    """
    refuse_options(env_id, options, *DATA_OPTIONS)
    installed = _installed()
    has_loader = hasattr(_imported(env_id), "load_environment")
    if has_loader and installed >= _FIRST_V1:
        raise EnvironmentUnusable(
            f"the environment {env_id} defines load_environment, which verifiers {_version()} no "
            "longer supports; install 'verifiers<0.4' instead"
        )
    if not has_loader and installed < _FIRST_V1:
        raise EnvironmentUnusable(
            f"the environment {env_id} defines no load_environment; if it exports a Taskset, "
            f"install 'verifiers>=0.4' instead of verifiers {_version()}"
        )
    return has_loader


def _installed() -> tuple[int, ...]:
    """The first two numbers of the version."""
    try:
        found = tuple(int(number) for number in _version().split(".")[:2])
    except PackageNotFoundError as error:
        raise EnvironmentUnusable(
            f"the package verifiers is not installed beside env-server; {_INSTALL}"
        ) from error
    if found < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise EnvironmentUnusable(
            f"verifiers {_version()} is too old; install {oldest} or newer: {_INSTALL}"
        )
    return found


def _version() -> str:
    return version("verifiers")


def _imported(env_id: str) -> ModuleType:
    """The environment's module, by verifiers' rules: `owner/my-env@1.0` is the module `my_env`."""
    name = env_id.rpartition("/")[2].partition("@")[0].replace("-", "_")
    os.environ.setdefault("VF_LOG_LEVEL", "WARNING")  # verifiers logs every rollout at INFO
    sys.path.insert(0, "")  # an environment may be a file in the directory of the command
    try:
        own = f"verifiers.v1.tasksets.{name}"
        return import_module(own if find_spec("verifiers.v1.tasksets") and find_spec(own) else name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise EnvironmentUnusable(
                f"the environment {env_id} needs the module {error.name}, which is not installed"
            ) from error
        raise EnvironmentUnusable(
            f"there is no verifiers environment {env_id}: no module {name}; install the "
            f"environment's package beside env-server, or start env-server beside {name}.py"
        ) from error
    except Exception as error:
        raise EnvironmentUnusable(
            f"the environment {env_id} cannot be imported: {where(error)}"
        ) from error
