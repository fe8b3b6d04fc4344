"""Rollouts in containers: tasks in the form of Harbor."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_env.bridges.harbor import HarborTask
from grpo_env.loading import TaskSpec
from grpo_env.sandbox import SandboxUnusable
from grpo_env.sandbox.container import LABEL
from grpo_env.tasks import RolloutFailed, TaskOptions
from tests.containers.stack import docker
from tests.support.harbor import write_task
from tests.unit.env.bridges.scripted import ScriptedDialogue

ROW = {"task": "."}
INSTRUCTION = "Write 7 into answer.txt."


def call(command: str) -> str:
    content = {"name": "bash", "arguments": {"command": command}}
    return f"<tool_call>{json.dumps(content)}</tool_call>"


@pytest.fixture
def task(base_image: str, tmp_path: Path) -> Iterator[HarborTask]:
    little = "[environment]\nmemory_mb = 64\n"
    directory = write_task(tmp_path / "number", INSTRUCTION, image=base_image, config=little)
    yield opened(directory)
    assert docker("ps", "--all", "--quiet", "--filter", f"label={LABEL}") == ""


def opened(directory: Path, **arguments: object) -> HarborTask:
    made = TaskSpec(f"harbor:{directory}", TaskOptions(args={"command_s": 5, **arguments})).make()
    assert isinstance(made, HarborTask)
    assert made.rows("train") == [ROW]
    return made


async def test_the_policy_works_in_a_container_until_it_answers_without_a_call(
    task: HarborTask,
) -> None:
    dialogue = ScriptedDialogue(call("echo 7 > answer.txt"), call("cat answer.txt; pwd"), "done")
    graded = await task.run(ROW, dialogue)
    assert (graded.score, graded.reason) == (1.0, "no call")
    assert dict(graded.parts) == {"reward": 1.0, "turns": 3.0, "last_reward": 0.0}
    said = dialogue.requests[-1]
    assert said[0] == {"role": "user", "content": INSTRUCTION}
    assert said[-1] == {"role": "tool", "name": "bash", "content": "7\n/app"}
    assert dialogue.options[0]["tools"][0]["function"]["name"] == "bash"


async def test_rollouts_share_nothing(task: HarborTask) -> None:
    writer = ScriptedDialogue(call("echo 7 > answer.txt"), "done")
    other = ScriptedDialogue(call("ls"), "done")
    graded = await asyncio.gather(task.run(ROW, writer), task.run(ROW, other))
    assert [one.score for one in graded] == [1.0, 0.0]
    assert other.requests[-1][-1]["content"] == "(no output)"


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("sleep 60", "(ended by the limit: timeout)"),
        ("kill -9 -1; echo left", "(exit status 137)"),
        (
            "echo Error response from daemon >&2; exit 1",
            "Error response from daemon\n(exit status 1)",
        ),
        ("python3 -c 'x = bytearray(10**10)'", "(exit status 137)"),
        ("python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 80))'", "unreachable"),
    ],
)
async def test_a_command_ends_with_its_limit_and_ends_no_container(
    task: HarborTask, command: str, answer: str
) -> None:
    dialogue = ScriptedDialogue(call(command), call("echo still here"), "done")
    assert (await task.run(ROW, dialogue)).score == 0.0
    assert (
        answer in dialogue.requests[1][-1]["content"]
        or "(exit status 137)" in (dialogue.requests[1][-1]["content"])
    )
    assert dialogue.requests[2][-1]["content"] == "still here"


async def test_a_reward_that_the_policy_writes_and_tests_that_it_changes_do_not_count(
    task: HarborTask,
) -> None:
    cheat = "echo 1 > /logs/verifier/reward.txt; mkdir -p /tests; echo 'exit 0' > /tests/test.sh"
    assert (await task.run(ROW, ScriptedDialogue(call(cheat), "done"))).score == 0.0


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        ("echo broken; exit 3\n", r"wrote no reward; its output:\nbroken\n\(exit status 3\)"),
        ("echo x > /logs/verifier/reward.txt\n", "wrote the reward 'x'"),
        ("sleep 60\n", r"ended by the limit: timeout \(1 s"),
        ("head -c 9000000 /dev/zero\n", r"ended by the limit: output \(1 s, 8 MiB"),
    ],
)
async def test_tests_without_a_reward_fail_the_rollout(
    base_image: str, tmp_path: Path, tests: str, problem: str
) -> None:
    tests, config = f"#!/bin/bash\n{tests}", "[verifier]\ntimeout_sec = 1\n"
    write_task(tmp_path / "bad", "Go.", image=base_image, tests=tests, config=config)
    with pytest.raises(RolloutFailed, match=problem):
        await opened(tmp_path / "bad").run(ROW, ScriptedDialogue("done"))


async def test_an_image_that_cannot_be_built_is_named(base_image: str, tmp_path: Path) -> None:
    directory = write_task(tmp_path / "bad", "Go.", image=f"{base_image}\nRUN echo no; exit 4")
    with pytest.raises(SandboxUnusable, match=r"docker build failed:\n(.|\n)*exit code: 4"):
        await opened(directory).run(ROW, ScriptedDialogue("done"))


def test_a_missing_engine_is_named(task: HarborTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    with pytest.raises(SandboxUnusable, match="set DOCKER_HOST"):
        task.rows("train")
