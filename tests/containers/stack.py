"""One stack in containers, as a user starts it: with make, under a project and ports of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_runs.process.ports import free_port
from tests.support.wait import wait_for

ROOT = Path(__file__).resolve().parents[2]
UP_WITHIN_S = 900
RUN_WITHIN_S = 1800
TEST_WITHIN_S = 4 * 3600
"""More than all that a test waits for, images that are built included: what is late is named."""
NOISE = 1e-4
"""Of log-probabilities of float32 weights, computed by two programs."""
Done = subprocess.CompletedProcess[str]


def own_ports() -> dict[str, str]:
    return {"RUN_API_PORT": str(free_port()), "VLLM_PORT": str(free_port())}


@dataclass
class Stack:
    """`settings` go into the environment of every command."""

    mode: str
    project: str
    settings: Mapping[str, str] = field(default_factory=dict)

    def up(self, **settings: str) -> Done:
        return self.make("up", **settings)

    def up_well(self, **settings: str) -> None:
        done = self.up(**settings)
        assert done.returncode == 0, done.stdout + done.stderr + self.logs()

    def down(self) -> None:
        """Nothing of it is left."""
        done = self.make("down", VOLUMES="1")
        assert done.returncode == 0, done.stderr
        assert self.left_behind() == []

    def make(self, target: str, **settings: str) -> Done:
        targets = [target, f"MODE={self.mode}", f"PROJECT={self.project}"]
        return self._run(["make", "--no-print-directory", *targets], settings)

    def compose(self, *arguments: str, **settings: str) -> Done:
        """Compose without make."""
        command = ["docker", "compose", "--project-name", self.project, "--profile", self.mode]
        return self._run([*command, *arguments], settings)

    def container(self, service: str) -> str:
        """Id of the one container of a service; server and trainer go without their mode."""
        (identity,) = self.containers(service)
        return identity

    def containers(self, service: str) -> list[str]:
        lines = docker("ps", "--all", "--no-trunc", *self.label(), "--format", "{{.ID}} {{.Names}}")
        found = [line.split() for line in lines.splitlines()]
        return [i for i, name in found if name.startswith(f"{self.project}-{service}-")]

    def inspect(self, service: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(docker("inspect", self.container(service)))
        return found[0]

    def restarts(self) -> dict[str, int]:
        """How often Docker had to start a service again."""
        services = ("vllm-server", "trainer", "environment")
        return {service: int(self.inspect(service)["RestartCount"]) for service in services}

    def wait_for_the_end(self, service: str = "trainer") -> None:
        """Which must be a good one."""
        command = ["docker", "wait", self.container(service)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=RUN_WITHIN_S, check=True
        )
        assert int(done.stdout) == 0, self.logs()

    def steps(self) -> int:
        """How many steps the trainer has recorded."""
        count = f"test ! -e {self.metrics} || wc -l < {self.metrics}"
        return int(docker("exec", self.container("trainer"), "sh", "-c", count) or 0)

    def fetch(self, directory: Path) -> list[dict[str, Any]]:
        """Copy what was trained into `directory`/<mode>; returns the record of each step."""
        fetched = self.make("fetch-checkpoint", TO=str(directory))
        assert fetched.returncode == 0, fetched.stderr
        lines = (directory / self.mode / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def wait_until(self, holds: Callable[[], object]) -> None:
        try:
            wait_for(holds, deadline_s=RUN_WITHIN_S)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.logs()}") from None

    def logs(self, tail: int = 30) -> str:
        names = docker("ps", "--all", *self.label(), "--format", "{{.Names}} {{.Status}}")
        parts = [names]
        for line in names.splitlines():
            command = ["docker", "logs", "--tail", str(tail), line.split()[0]]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            parts.append(f"\n== {line}\n{done.stdout}{done.stderr}")
        return "\n".join(parts)

    def left_behind(self) -> list[str]:
        """Containers, volumes and networks of the project."""
        kinds = (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
        return [name for kind in kinds for name in docker(*kind, "--quiet", *self.label()).split()]

    def environment(self) -> dict[str, str]:
        """What its commands run with."""
        return {**os.environ, **self.settings}

    @property
    def metrics(self) -> str:
        return f"/checkpoints/{self.mode}/metrics.jsonl"

    def label(self) -> list[str]:
        return ["--filter", f"label=com.docker.compose.project={self.project}"]

    def _run(self, command: list[str], settings: Mapping[str, str]) -> Done:
        return run(command, {**self.environment(), **settings})


def run(command: list[str], environment: Mapping[str, str] | None = None) -> Done:
    """In the repository's root."""
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=UP_WITHIN_S,
        check=False,
    )


def docker(*arguments: str) -> str:
    done = run(["docker", *arguments])
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}"
    return done.stdout
