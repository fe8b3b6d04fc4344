"""Words of docker commands."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from grpo_env.sandbox import Limits, SandboxFailed, docker
from grpo_env.sandbox.container import variables

COMMAND = """#!/bin/sh
echo "$@" >>"$0.words"
[ "$1" != inspect ] || echo ${STATE:-2026-01-01 false 0}
[ "$1" != start ] || ${START:-true}
"""
"""Docker, as far as a run asks for it."""


@pytest.mark.parametrize("name", ["API_KEY", "GOOGLE_API_KEY", "PATHS", "PYTHONPATH"])
def test_a_command_line_shows_no_value(name: str) -> None:
    assert variables({name: "secret", "N": ""}) == ["--env", name, "--env", "N"]


@pytest.mark.parametrize("name", ["PATH", "HOME", "DOCKER_HOST", "LD_PRELOAD", "https_proxy"])
def test_a_variable_that_would_change_docker_itself_is_no_variable_of_it(name: str) -> None:
    assert variables({name: "/x"}) == ["--env", f"{name}=/x"]


@pytest.fixture(autouse=True)
def _scripted_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docker").write_text(COMMAND)
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("state", "start", "problem"),
    [
        ("0001-01-01 false 0", "sleep 100", "docker start failed: timeout"),
        ("2026-01-01 false 0", "false", "docker lost the program"),
    ],
)
async def test_an_engine_that_is_slow_or_goes_away_is_no_program_that_fails(
    monkeypatch: pytest.MonkeyPatch, state: str, start: str, problem: str
) -> None:
    monkeypatch.setenv("STATE", state)
    monkeypatch.setenv("START", start)
    with pytest.raises(SandboxFailed, match=problem):
        await docker.Docker().run(["agent"], limits=Limits(seconds=0.5))


async def test_a_container_of_an_ordinary_user_may_open_the_socket_of_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = tmp_path / "service.sock"
    monkeypatch.setattr(docker, "is_root", lambda: False)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(service))
        assert (await docker.Docker().run(["agent"], service=service)).ok
        assert stat.S_IMODE(service.stat().st_mode) == 0o666
    created = (tmp_path / "docker.words").read_text().splitlines()[0]
    assert f" --user {os.geteuid()}:{os.getegid()} " in created
