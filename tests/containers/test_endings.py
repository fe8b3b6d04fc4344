"""How a container ended is told, also of one that its restart policy has started again since."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.containers.stack import ROOT, TEST_WITHIN_S, Stack

PROJECT = "grpo-test-endings"
SAYS_WITHIN_S = 300

SERVICES = """
services:
  fine: {image: IMAGE, command: [sleep, infinity]}
  done: {image: IMAGE, command: [echo, well]}
  gone: {image: IMAGE, command: [sh, -c, "echo last words >&2; exit 4"]}
  ill:
    image: IMAGE
    command: [sh, -c, "echo cough; exec sleep infinity"]
    healthcheck: {test: [CMD, "false"], interval: 1s, retries: 1}
  again: &again
    image: IMAGE
    command: [sh, /again.sh]
    volumes: ["./again.sh:/again.sh:ro"]
    restart: on-failure:100
  awaited: *again
  unborn:
    image: IMAGE
    command: [echo, never]
    depends_on: {ill: {condition: service_healthy}}
"""
AGAIN = """
if [ ! -e /tmp/again ]; then
  touch /tmp/again
  echo "[info     ] step.finished step=1 steps=2 reward/mean=0.25 train/loss=0.1"
  echo "[error] no such weights" >&2
  while [ ! -e /tmp/end ]; do sleep 0.1; done
  exit 3
fi
while [ ! -e /tmp/go-on ]; do sleep 0.1; done
echo "[info     ] step.finished step=2 steps=2 reward/mean=0.75 train/loss=0.1"
while [ ! -e /tmp/well ]; do sleep 0.1; done
"""

pytestmark = pytest.mark.timeout(TEST_WITHIN_S)


@pytest.fixture(scope="module")
def endings(base_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Containers that have ended, in the ways that there are, and two that run and will."""
    directory = tmp_path_factory.mktemp("endings")
    (directory / "docker-compose.yml").write_text(SERVICES.replace("IMAGE", base_image))
    (directory / "again.sh").write_text(AGAIN)
    stack = Stack("none", PROJECT, {"COMPOSE_FILE": str(directory / "docker-compose.yml")})
    try:
        names = ("fine", "done", "gone", "ill", "again", "awaited")
        started = stack.compose("up", "--detach", *names)
        assert started.returncode == 0, started.stderr
        refused = stack.compose("up", "--detach", "unborn")
        assert f"{PROJECT}-ill-1 is unhealthy" in refused.stderr
        yield stack
    finally:
        assert stack.compose("down", "--timeout", "0").returncode == 0
        assert stack.left_behind() == []


def touch(stack: Stack, service: str, *paths: str) -> None:
    assert stack.compose("exec", service, "touch", *paths).returncode == 0


@contextmanager
def running(stack: Stack, script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The script, ended with all that it started where a test fails."""
    compose = ["docker", "compose", "--project-name", stack.project]
    process = subprocess.Popen(
        ["bash", str(ROOT / "containers" / script), *arguments, *compose],
        env=stack.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    end = threading.Timer(SAYS_WITHIN_S, os.killpg, (process.pid, signal.SIGKILL))
    end.start()
    try:
        with process:
            yield process
    finally:
        end.cancel()


def said(stack: Stack, script: str, *arguments: str) -> tuple[str, int]:
    """Its output and exit status."""
    with running(stack, script, *arguments) as process:
        return process.communicate()[0], process.returncode


def is_running_again(container: dict[str, Any]) -> bool:
    """Docker calls a container running while it restarts it, too."""
    state = container["State"]
    return container["RestartCount"] == 1 and state["Running"] and not state["Restarting"]


def test_every_container_that_ended_badly_is_explained(endings: Stack) -> None:
    touch(endings, "again", "/tmp/end")
    endings.wait_until(lambda: is_running_again(endings.inspect("again")))
    touch(endings, "again", "/tmp/go-on")
    # Compose takes it for one that ended with 0, and its log has moved on.
    again = "[info     ] step.finished step=2"
    endings.wait_until(lambda: again in endings.logs())
    explained, _ = said(endings, "explain.sh")
    assert "\ngone ended with status 4:\nlast words\n" in explained
    assert "\nill is unhealthy:\ncough\n" in explained
    assert "\nagain ended and was restarted (restart 1); its last lines" in explained
    assert "[error] no such weights\n" in explained
    for well in ("fine", "done", "awaited", again):
        assert well not in explained


def test_the_wait_goes_on_through_a_restart(endings: Stack) -> None:
    with running(endings, "wait.sh", "awaited") as waiting:
        assert waiting.stdout is not None
        assert sorted(next(waiting.stdout) for _ in range(2)) == [
            "[error] no such weights\n",
            "step 1/2  reward 0.250  loss 0.1000\n",
        ]
        touch(endings, "awaited", "/tmp/end")
        assert next(waiting.stdout) == "awaited ended and was restarted (restart 1)\n"
        touch(endings, "awaited", "/tmp/go-on")
        assert next(waiting.stdout) == "step 2/2  reward 0.750  loss 0.1000\n"
        touch(endings, "awaited", "/tmp/well")
        assert waiting.communicate()[0] == "awaited ended with status 0\n"
        assert waiting.returncode == 0


def test_the_wait_ends_with_the_last_status_and_words(endings: Stack) -> None:
    assert said(endings, "wait.sh", "gone") == ("gone ended with status 4\nlast words\n", 4)


def test_what_never_started_is_not_waited_for(endings: Stack) -> None:
    words, status = said(endings, "wait.sh", "unborn")
    assert "unborn was created but not started" in words
    assert status == 1
