"""Reads the directories of Harbor's tasks: https://harborframework.com/docs/tasks

instruction.md              what the policy reads
task.toml                   limits and resources
environment/Dockerfile      the container
tests/test.sh               writes the reward
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_env.bridges.errors import EnvironmentUnusable
from grpo_env.sandbox.container import Resources

CONFIG = "task.toml"
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


@dataclass(frozen=True)
class HarborDirectory:
    """One task.

    image: that it names instead of a Dockerfile; build_s, tests_s: limits; user: of the policy's
    commands; tests_user: of the tests; tests_environment: their variables.
    """

    path: Path
    instruction: str
    resources: Resources
    image: str | None
    build_s: float
    tests_s: float
    user: str | None
    tests_user: str | None
    tests_environment: Mapping[str, str]


def task_directories(directory: Path) -> list[Path]:
    """The tasks in a directory, or the directory itself if it is one.

    Raises:
        EnvironmentUnusable: there is none.
    """
    found = sorted(path.parent for path in directory.expanduser().rglob(CONFIG))
    if not found:
        raise EnvironmentUnusable(
            f"{directory} holds no task of Harbor; expected directories with {CONFIG}, "
            "instruction.md, environment/Dockerfile and tests/test.sh"
        )
    return found


def read_task(path: Path, network: str) -> HarborDirectory:
    """Read one task. network: of its container

    Raises:
        EnvironmentUnusable: a file is missing or invalid, or the task needs what is not supported.
    """
    try:
        config = tomllib.loads((path / CONFIG).read_text())
        instruction = (path / "instruction.md").read_text().strip()
    except (OSError, ValueError) as error:
        raise EnvironmentUnusable(f"{path}: {error}") from error
    environment, verifier = config.get("environment", {}), config.get("verifier", {})
    if problems := [
        *_problems(path, config, environment, verifier),
        *([] if instruction else ["an empty instruction.md"]),
    ]:
        raise EnvironmentUnusable(f"the task {path} cannot be used here: {', '.join(problems)}")
    return HarborDirectory(
        path,
        instruction,
        _resources(path, environment, network),
        environment.get("docker_image"),
        float(environment.get("build_timeout_sec", 600.0)),
        float(verifier.get("timeout_sec", 600.0)),
        _text(config.get("agent", {}).get("user")),
        _text(verifier.get("user")),
        _resolved(path, verifier.get("env", {})),
    )


def _problems(
    path: Path,
    config: Mapping[str, Any],
    environment: Mapping[str, Any],
    verifier: Mapping[str, Any],
) -> Iterator[str]:
    if not (path / "tests" / "test.sh").is_file():
        yield "no tests/test.sh"
    if not (environment.get("docker_image") or (path / "environment" / "Dockerfile").is_file()):
        yield "no environment/Dockerfile"
    if (path / "environment" / "docker-compose.yaml").exists():
        yield "environment/docker-compose.yaml (several containers)"
    if config.get("steps"):
        yield "several steps"
    if verifier.get("environment") or verifier.get("environment_mode") == "separate":
        yield "tests in a container of their own"
    if str(environment.get("os", "linux")).lower() != "linux":
        yield f"os = {environment['os']!r}"
    for name in ("gpus", "tpu", "mcp_servers", "healthcheck"):
        if environment.get(name):
            yield f"{name} of [environment]"


def _resources(path: Path, environment: Mapping[str, Any], network: str) -> Resources:
    usual = Resources()
    return Resources(
        memory_mb=int(environment.get("memory_mb") or usual.memory_mb),
        cpus=float(environment.get("cpus") or usual.cpus),
        network=network,
        workdir=environment.get("workdir"),
        environment=_resolved(path, environment.get("env", {})),
    )


def _resolved(path: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """`${NAME}` and `${NAME:-default}` are variables of this process."""

    def value(match: re.Match[str]) -> str:
        name, default = match.groups()
        found = os.environ.get(name, default)
        if found is None:
            raise EnvironmentUnusable(f"the task {path} needs the environment variable {name}")
        return found

    return {name: _VARIABLE.sub(value, str(text)) for name, text in variables.items()}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
