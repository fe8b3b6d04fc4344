"""Secrets of a run are in no file, on no command line and on no screen."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.demo_run import DEADLINE_S
from tests.e2e.planted_run import PlantedRun, planted_run
from tests.support.planted import files_below, leaks

TRACKED = "--steps 2 --use-wandb --report-to trackio --objective distill --teacher-model tiny"
OWN_REWARD, EVERYTHING = "own reward", "trackers and teacher"

pytestmark = pytest.mark.timeout(DEADLINE_S + 60)


@pytest.fixture(
    scope="module", params=[OWN_REWARD, pytest.param(EVERYTHING, marks=pytest.mark.full)]
)
def made(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Path,  # noqa: ARG001
) -> PlantedRun:
    if request.param == OWN_REWARD:
        found: Any = request.getfixturevalue("own_reward_run_with_secrets")
        assert isinstance(found, PlantedRun)
        return found
    directory = tmp_path_factory.mktemp("planted") / "run"
    made = planted_run(directory, *shlex.split(TRACKED))
    assert [*directory.parent.glob("wandb/offline-run-*/*.wandb")]
    assert [*directory.parent.glob("db/*.db")]
    return made


def test_no_file_of_the_run_shows_a_secret(made: PlantedRun) -> None:
    directory = made.run.directory
    assert (directory / "report.html").is_file()
    redis = directory / "redis"
    assert leaks(files_below(directory.parent, skipped=redis), made.secrets) == []
    # Redis reads its password from a file, as do the services of a resumed run.
    assert redis.stat().st_mode & 0o777 == 0o700


def test_no_command_line_shows_a_secret(made: PlantedRun) -> None:
    modules = {line.split(b"\0")[2] for _, line in made.command_lines if b"\0-m\0grpo_" in line}
    assert {b"grpo_api", b"grpo_env", b"grpo_trainer", b"grpo_vllm"} <= modules
    assert leaks(made.command_lines, made.secrets) == []


def test_the_terminal_shows_no_secret(made: PlantedRun) -> None:
    assert "--on-end: the notification was not delivered" in made.run.errors
    shown = (made.run.output + made.run.errors).encode()
    assert leaks([("terminal", shown)], made.secrets) == []
