"""Reads the directories of Harbor's tasks: https://harborframework.com/docs/tasks

instruction.md              what the policy reads
task.toml                   limits and resources
environment/Dockerfile      the container
tests/test.sh               writes the reward
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import structlog
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from grpo_core.errors import problems_of
from grpo_core.settings.command import holds_secret
from grpo_env.bridges import EnvironmentUnusable
from grpo_env.sandbox.container import Resources

log = structlog.get_logger()

CONFIG = "task.toml"
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_MEGABYTES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
_WITHOUT_EFFECT = {
    *("storage_mb", "storage", "network_mode", "allowed_hosts", "allow_internet"),
    *("gpu_types", "skills_dir"),
}
"""Keys of [environment] that Harbor has. docs/how-to/harbor.md lists them."""


def _megabytes(size: Any) -> Any:
    """Older tasks write `2G`, `512M` or `512K`."""
    text = str(size).strip().upper()
    factor = _MEGABYTES.get(text[-1:])
    return int(float(text[:-1]) * factor) if factor else size


class _Environment(BaseModel):
    """[environment]"""

    model_config = ConfigDict(extra="allow")

    docker_image: str | None = None
    build_timeout_sec: float = 600.0
    cpus: PositiveFloat = Resources.cpus
    memory_mb: Annotated[PositiveInt, BeforeValidator(_megabytes)] = Field(
        Resources.memory_mb, validation_alias=AliasChoices("memory_mb", "memory")
    )
    workdir: str | None = None
    env: dict[str, Any] = {}
    os: str = "linux"
    gpus: Any = None
    tpu: Any = None
    mcp_servers: Any = None
    healthcheck: Any = None


_User = Annotated[str | None, Field(coerce_numbers_to_str=True)]


class _Verifier(BaseModel):
    """[verifier]"""

    timeout_sec: float = 600.0
    user: _User = None
    env: dict[str, Any] = {}
    environment: Any = None
    environment_mode: Any = None


class _Agent(BaseModel):
    """[agent]"""

    user: _User = None


class HarborConfig(BaseModel):
    """task.toml"""

    environment: _Environment = _Environment()
    verifier: _Verifier = _Verifier()
    agent: _Agent = _Agent()
    steps: Any = None


@dataclass(frozen=True)
class HarborDirectory:
    """One task. resources: of its container; tests_environment: variables of its tests."""

    path: Path
    instruction: str
    config: HarborConfig
    resources: Resources
    tests_environment: Mapping[str, str]


def task_directories(directory: Path) -> list[Path]:
    """The tasks in a directory, or the directory itself if it is one. Raises `EnvironmentUnusable`:
    there is none."""
    found = sorted(path.parent for path in directory.expanduser().rglob(CONFIG))
    if not found:
        raise EnvironmentUnusable(
            f"{directory} holds no task of Harbor; expected directories with {CONFIG}, "
            "instruction.md, environment/Dockerfile and tests/test.sh"
        )
    return found


def read_task(path: Path, network: str, variables: Collection[str] = ()) -> HarborDirectory:
    """Read one task. network: of its container; variables: of this process that it may read

    Raises:
        EnvironmentUnusable: a file is missing or invalid, or the task needs what is not supported.
    """
    try:
        config = HarborConfig.model_validate(tomllib.loads((path / CONFIG).read_text()))
        instruction = (path / "instruction.md").read_text().strip()
    except ValidationError as error:
        raise EnvironmentUnusable(f"{path / CONFIG}: {problems_of(error)}") from error
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise EnvironmentUnusable(f"{path}: {error}") from error
    environment, verifier = config.environment, config.verifier
    if problems := [
        *_problems(path, config),
        *_refused_variables([*environment.env.values(), *verifier.env.values()], variables),
        *([] if instruction else ["an empty instruction.md"]),
    ]:
        raise EnvironmentUnusable(f"the task {path} cannot be used here: {', '.join(problems)}")
    if unknown := (environment.model_extra or {}).keys() - _WITHOUT_EFFECT:
        log.warning("harbor.keys_ignored", task=str(path), environment=sorted(unknown))
    return HarborDirectory(
        path,
        instruction,
        config,
        Resources(
            memory_mb=environment.memory_mb,
            cpus=environment.cpus,
            network=network,
            workdir=environment.workdir,
            environment=_resolved(environment.env),
        ),
        _resolved(verifier.env),
    )


def _problems(path: Path, config: HarborConfig) -> Iterator[str]:
    environment, verifier = config.environment, config.verifier
    if not (path / "tests" / "test.sh").is_file():
        yield "no tests/test.sh"
    if not (environment.docker_image or (path / "environment" / "Dockerfile").is_file()):
        yield "no environment/Dockerfile"
    if (path / "environment" / "docker-compose.yaml").exists():
        yield "environment/docker-compose.yaml (several containers)"
    if config.steps:
        yield "several steps"
    if verifier.environment or verifier.environment_mode == "separate":
        yield "tests in a container of their own"
    if environment.os.lower() != "linux":
        yield f"os = {environment.os!r}"
    for name in ("gpus", "tpu", "mcp_servers", "healthcheck"):
        if getattr(environment, name):
            yield f"{name} of [environment]"


def _refused_variables(texts: Iterable[Any], allowed: Collection[str]) -> Iterator[str]:
    """Somebody else wrote the task, so it reads only variables that the user names."""
    for match in _VARIABLE.finditer("\n".join(map(str, texts))):
        name, default = match.groups()
        if holds_secret(name):
            yield f"the environment variable {name}, which may hold a secret of the run"
        elif name not in allowed and (name in os.environ or default is None):
            allow = json.dumps({"variables": [name]})
            yield f"the environment variable {name}, which --task-args '{allow}' allows"
        elif name not in os.environ and default is None:
            yield f"the environment variable {name}, which is not set"


def _resolved(variables: Mapping[str, Any]) -> dict[str, str]:
    """`${NAME}` and `${NAME:-default}` are variables of this process."""

    def value(match: re.Match[str]) -> str:
        return os.environ.get(*match.groups())

    return {name: _VARIABLE.sub(value, str(text)) for name, text in variables.items()}
