"""One stack in containers, as a user starts it: with make, under a project and ports of its own."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("redis", "run-api", "environment", "vllm-server", "trainer")
UP_WITHIN_S = 900
TEST_WITHIN_S = 4 * 3600
"""More than all that a test waits for, images that are built included: what is late is named."""
POLL_S = 0.5


@dataclass
class Stack:
    """`settings` go into the environment of every command."""

    mode: str
    project: str
    settings: Mapping[str, str] = field(default_factory=dict)

    def up(self, **settings: str) -> subprocess.CompletedProcess[str]:
        return self.make("up", **settings)

    def up_well(self) -> None:
        done = self.up()
        assert done.returncode == 0, done.stdout + done.stderr + self.logs()

    def down(self) -> None:
        done = self.make("down", VOLUMES="1")
        assert done.returncode == 0, done.stderr

    def make(self, target: str, **settings: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "--no-print-directory", target, f"MODE={self.mode}"]
        command += [f"PROJECT={self.project}"]
        return self._run(command, UP_WITHIN_S, settings)

    def compose(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Compose without make."""
        command = ["docker", "compose", "--project-name", self.project, "--profile", self.mode]
        return self._run([*command, *arguments], UP_WITHIN_S, {})

    def container(self, service: str) -> str:
        """Id of the one container of a service; server and trainer go without their mode."""
        lines = docker(
            "ps", "--all", "--no-trunc", *self._label(), "--format", "{{.ID}} {{.Names}}"
        )
        found = [line.split() for line in lines.splitlines()]
        (identity,) = [i for i, name in found if name.startswith(f"{self.project}-{service}-")]
        return identity

    def inspect(self, service: str) -> dict[str, Any]:
        (answer,) = json.loads(docker("inspect", self.container(service)))
        found: dict[str, Any] = answer
        return found

    def pid(self, service: str) -> int:
        return int(self.inspect(service)["State"]["Pid"])

    def restarts(self, service: str) -> int:
        return int(self.inspect(service)["RestartCount"])

    def wait_for_the_trainer(self, within_s: float) -> int:
        """Its exit status."""
        said = subprocess.run(
            ["docker", "wait", self.container("trainer")],
            capture_output=True,
            text=True,
            timeout=within_s,
            check=True,
        )
        return int(said.stdout)

    def steps(self) -> int:
        """How many steps the trainer has recorded."""
        path = f"/checkpoints/{self.mode}/metrics.jsonl"
        count = f"import pathlib; p = pathlib.Path('{path}'); "
        count += "print(len(p.read_text().splitlines()) if p.exists() else 0)"
        return int(docker("exec", self.container("trainer"), "python3", "-c", count))

    def wait_until(self, holds: Callable[[], bool], within_s: float, what: str) -> None:
        give_up_at = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < give_up_at, (
                f"{what}: not within {within_s:g} s\n{self.logs()}"
            )
            time.sleep(POLL_S)

    def logs(self, tail: int = 30) -> str:
        names = docker("ps", "--all", *self._label(), "--format", "{{.Names}} {{.Status}}")
        parts = [names]
        for line in names.splitlines():
            command = ["docker", "logs", "--tail", str(tail), line.split()[0]]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            parts.append(f"\n== {line}\n{done.stdout}{done.stderr}")
        return "\n".join(parts)

    def left_behind(self) -> list[str]:
        """Containers, volumes and networks of the project."""
        kinds = (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
        return [name for kind in kinds for name in docker(*kind, "--quiet", *self._label()).split()]

    def environment(self) -> dict[str, str]:
        """What its commands run with."""
        return {**os.environ, **self.settings}

    def _label(self) -> list[str]:
        return ["--filter", f"label=com.docker.compose.project={self.project}"]

    def _run(
        self, command: list[str], within_s: float, settings: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=ROOT,
            env={**self.environment(), **settings},
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}"
    return done.stdout
