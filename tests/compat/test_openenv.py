"""Environments on unmodified OpenEnv run as tasks: served here and elsewhere, with its newest
version and with the last one named openenv-core."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_env.bridges import EnvironmentLost, EnvironmentUnusable
from grpo_env.bridges.openenv import OpenEnvTask
from grpo_env.bridges.openenv_server import LocalServer
from grpo_env.loading import TaskSpec
from grpo_env.tasks import Graded, RolloutFailed, TaskOptions
from tests.compat.upstream_processes import installed
from tests.unit.env.bridges.scripted import ScriptedDialogue

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first use installs packages

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = Path(__file__).parent / "openenv_environments"
CALL = '<tool_call>{{"name": "add", "arguments": {{"a": 2, "b": {}}}}}</tool_call>'


@pytest.fixture(scope="module", params=["openenv.txt", "openenv-core.txt"])
def python(request: pytest.FixtureRequest) -> str:
    return str(installed(ROOT / "requirements" / request.param).python)


@pytest.fixture(scope="module")
def digits(python: str) -> Iterator[str]:
    """The address of a server that was started elsewhere."""
    server = LocalServer("app:app", ENVIRONMENTS / "digits", python)
    yield server.url
    server.close()


@contextmanager
def opened(server: str | Path, python: str, **arguments: Any) -> Iterator[OpenEnvTask]:
    """A task whose server has started."""
    options = TaskOptions(args={"python": python, **arguments})
    task = TaskSpec(f"openenv:{server}", options).make()
    assert isinstance(task, OpenEnvTask)
    try:
        assert task.rows("train")
        yield task
    finally:
        task.close()


async def test_a_local_environment_is_played_turn_by_turn(python: str) -> None:
    with opened(ENVIRONMENTS / "digits", python, episodes=3, first_seed=4) as task:
        assert (task.name, task.rows("train")) == ("digits", [{"seed": n} for n in (4, 5, 6)])
        dialogue = ScriptedDialogue("2", "nine", "I say 4.")
        graded = await task.run({"seed": 4}, dialogue)
    # The second answer is no digit, so the environment never sees it.
    parts = {"state/step_count": 2.0, "turns": 3.0, "last_reward": 1.0}
    assert graded == Graded(parts, "done", score=0.9)
    assert [message["content"] for message in dialogue.requests[-1]] == [
        *("Guess a digit.", "2", "higher"),
        *("nine", "error: expected a value for digit (integer)"),
    ]
    assert not psutil.Process().children(recursive=True)


async def test_the_environment_made_by_its_own_generator_runs(python: str, tmp_path: Path) -> None:
    made = [python, "-m", "openenv.cli", "init", "my_env"]
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    relative = os.path.relpath(python)
    with opened(tmp_path / "my_env", relative, max_turns=2, observation="echoed_message") as task:
        dialogue = ScriptedDialogue("abc", "abcde")
        graded = await task.run({"seed": 0}, dialogue)
    assert (round(graded.score or 0, 6), graded.reason) == (0.8, "turn limit")
    assert dialogue.requests[-1][-1] == {"role": "user", "content": "abc"}


async def test_an_environment_of_tools_shows_them_to_the_policy(python: str) -> None:
    with opened(ENVIRONMENTS / "sums", python) as task:
        dialogue = ScriptedDialogue(CALL.format(3) + CALL.format('"x"'), "5")
        graded = await task.run({"prompt": "What is 2+3?"}, dialogue)
    assert (graded.score, graded.parts["turns"], graded.reason) == (1.0, 2.0, "no call")
    (tool,) = dialogue.options[0]["tools"]
    assert (tool["function"]["name"], tool["function"]["description"]) == (
        "add",
        "Adds two numbers.",
    )
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    question, _, *results = dialogue.requests[-1]
    assert question["content"].startswith("What is 2+3?")
    assert results[0] == {"role": "tool", "name": "add", "content": "5"}
    assert results[1]["content"].startswith("error: ")


async def test_a_server_elsewhere_has_room_for_two_and_serves_six_rollouts(
    digits: str, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"seed": n}) + "\n" for n in range(6)))
    task = OpenEnvTask(TaskOptions(data=str(rows)), digits)
    found = task.rows("train")
    assert found == [{"seed": n} for n in range(6)]
    assert task.rows("test") is None
    runs = (task.run(row, ScriptedDialogue(str(row["seed"]), delay_s=0.05)) for row in found)
    graded = await asyncio.gather(*runs)
    assert [one.score for one in graded] == [1.0] * 6


async def test_an_error_of_the_environment_fails_the_rollout_and_frees_its_session(
    digits: str,
) -> None:
    task = OpenEnvTask(TaskOptions(), digits)
    for _ in range(3):  # with room for two
        with pytest.raises(RolloutFailed, match="step: digits are not negative"):
            await task.run({"seed": 0}, ScriptedDialogue("-1"))


async def test_a_server_that_ends_is_named_with_its_last_lines(python: str) -> None:
    with opened(ENVIRONMENTS / "digits", python) as task:
        with pytest.raises(EnvironmentLost, match=r"\(app:app\) ended with status 3") as error:
            await task.run({"seed": 0}, ScriptedDialogue("-2"))
        assert "Uvicorn running" in str(error.value)
        with pytest.raises(EnvironmentLost, match="ended with status 3"):
            await task.run({"seed": 0}, ScriptedDialogue("1"))


async def test_what_is_no_server_of_openenv_and_one_that_is_gone_are_named(python: str) -> None:
    server = LocalServer("fastapi:FastAPI", ENVIRONMENTS, python)
    task = OpenEnvTask(TaskOptions(), server.url)
    try:
        with pytest.raises(EnvironmentUnusable, match="not what a server of OpenEnv answers"):
            task.rows("train")
        with pytest.raises(EnvironmentUnusable, match=r"/ws takes no WebSocket \(403\)"):
            await task.run({"seed": 0}, ScriptedDialogue("1"))
    finally:
        server.close()
    with pytest.raises(EnvironmentLost, match=f"{task.server} does not answer any more"):
        await task.run({"seed": 7}, ScriptedDialogue("7"))
