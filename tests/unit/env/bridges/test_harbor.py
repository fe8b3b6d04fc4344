"""Directories of Harbor's tasks, and the rewards that their tests write. Rollouts in containers:
tests/containers/test_harbor.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from grpo_env.bridges import EnvironmentUnusable
from grpo_env.bridges.harbor import HarborTask, _HarborEpisode, rewards_from
from grpo_env.bridges.harbor_tasks import read_task, task_directories
from grpo_env.sandbox.container import Container, Resources
from grpo_env.tasks import RolloutFailed, TaskOptions
from tests.support.harbor import write_task
from tests.unit.env.bridges.scripted import ScriptedDialogue

FULL = """
[verifier]
timeout_sec = 90
env = { KEY = "${HARBOR_KEY:-none}" }
[agent]
user = "worker"
[environment]
docker_image = "somewhere/made:1"
build_timeout_sec = 60
cpus = 2
memory_mb = 512
workdir = "/work"
gpus = 0
mcp_servers = []
env = { HOME = "/root/${HARBOR_PLACE}" }
"""


def test_a_directory_is_a_task_or_holds_tasks(tmp_path: Path) -> None:
    for name in ("b", "sub/a"):
        write_task(tmp_path / name, "Do it.")
    assert task_directories(tmp_path) == [tmp_path / "b", tmp_path / "sub/a"]
    assert task_directories(tmp_path / "b") == [tmp_path / "b"]
    assert [*HarborTask(str(tmp_path), TaskOptions())._tasks] == ["b", "sub/a"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(EnvironmentUnusable, match="empty holds no task of Harbor; expected"):
        task_directories(tmp_path / "empty")


def test_what_a_task_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARBOR_PLACE", "here")
    monkeypatch.delenv("HARBOR_KEY", raising=False)
    plain = read_task(write_task(tmp_path / "plain", "\nDo it.\n"), "none")
    assert (plain.instruction, plain.resources) == ("Do it.", Resources())
    config = plain.config
    assert (config.environment.docker_image, config.agent.user) == (None, None)
    assert (config.verifier.timeout_sec, config.environment.build_timeout_sec) == (600.0, 600.0)
    full = read_task(
        write_task(tmp_path / "full", "Do it.", config=FULL), "bridge", ["HARBOR_PLACE"]
    )
    environment = {"HOME": "/root/here"}
    assert full.resources == Resources(512, 2.0, 512, "bridge", "/work", environment)
    config = full.config
    assert config.environment.docker_image == "somewhere/made:1"
    assert (config.agent.user, config.verifier.timeout_sec) == ("worker", 90.0)
    assert full.tests_environment == {"KEY": "none"}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("[[steps]]\nname = 'one'\n", "several steps"),
        ("[verifier]\nenvironment_mode = 'separate'\n", "tests in a container of their own"),
        ("[environment]\ngpus = 1\nos = 'windows'\n", "os = 'windows', gpus of"),
        ("[environment]\nenv = { A = '${HARBOR_MISSING}' }\n", "variable HARBOR_MISSING"),
        ("[environment\n", "Expected ']'"),
        ("[environment]\nmemory = 'infG'\n", "cannot convert float infinity"),
        ("[environment]\nmemory = 'much'\ncpus = 0\n", r"task\.toml: environment\.cpus: .*0; env"),
        ("environment = 3\n", r"task/task\.toml: environment: Input should be a valid"),
    ],
)
def test_a_task_that_needs_more_is_refused(tmp_path: Path, config: str, problem: str) -> None:
    write_task(tmp_path / "task", "Do it.", config=config)
    with pytest.raises(EnvironmentUnusable, match=problem):
        HarborTask(str(tmp_path), TaskOptions())


def test_a_task_reads_variables_that_the_user_allows_and_never_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("RUN_API_TOKEN", "HF_TOKEN", "REDIS_URL", "GRPO_TEACHER_API_KEY_FILE", "JUDGE_KEY")
    for name in names:
        monkeypatch.setenv(name, "hush")
    first, *rest = (f'{name} = "${{{name}:-none}}"' for name in names)
    config = f"[verifier.env]\n{first}\n[environment.env]\n" + "\n".join(rest)
    write_task(tmp_path / "task", "Do it.", config=config)
    with pytest.raises(EnvironmentUnusable) as refused:
        HarborTask(str(tmp_path), TaskOptions(args={"variables": names[:-1]}))
    for name in names[:-1]:
        assert f"{name}, which may hold a secret" in str(refused.value)
    assert """JUDGE_KEY, which --task-args '{"variables": ["JUDGE_KEY"]}' allows""" in str(
        refused.value
    )
    assert "hush" not in str(refused.value)
    write_task(tmp_path / "task", "Do it.", config=f"[environment.env]\n{rest[-1]}")
    allowed = HarborTask(str(tmp_path), TaskOptions(args={"variables": ["JUDGE_KEY"]}))
    assert allowed._tasks["task"].resources.environment == {"JUDGE_KEY": "hush"}


def test_memory_as_older_tasks_write_it_and_keys_without_a_meaning(tmp_path: Path) -> None:
    config = "[environment]\nmemory = '2.5G'\nstorage = '10G'\nmemroy_mb = 7\n"
    with capture_logs() as logs:
        task = read_task(write_task(tmp_path, "Do it.", config=config), "none")
    assert task.resources.memory_mb == 2560
    assert [(log["event"], log["environment"]) for log in logs] == [
        ("harbor.keys_ignored", ["memroy_mb"])
    ]


@pytest.mark.parametrize("command", ["a\0b", "\ud800", "x" * 2**17], ids=["NUL", "half", "long"])
async def test_a_command_that_linux_cannot_pass_on_is_answered(
    tmp_path: Path, command: str
) -> None:
    directory = read_task(write_task(tmp_path, "Do it."), "none")
    episode = _HarborEpisode(directory, Container("none"), 1.0)
    call = {"name": "bash", "arguments": {"command": command}}
    answer = f"<tool_call>{json.dumps(call)}</tool_call>"
    shown = await episode.act(await ScriptedDialogue(answer).say([]))
    assert shown.messages[0]["content"].startswith("error: a command has fewer than 128 KiB")


def test_missing_files_are_listed(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", " ")
    (task / "tests/test.sh").unlink()
    (task / "environment/Dockerfile").unlink()
    missing = "no tests/test.sh, no environment/Dockerfile, an empty instruction.md"
    with pytest.raises(EnvironmentUnusable, match=missing):
        read_task(task, "none")


@pytest.mark.parametrize(
    ("text", "rewards"),
    [
        ("1\n", {"reward": 1.0}),
        ("0.25", {"reward": 0.25}),
        *((text, {"reward": 0.5}) for text in (".5\n", "+0.5", "00.5", "5e-1")),
        ('{"reward": 1, "style": 0.5}', {"reward": 1.0, "style": 0.5}),
    ],
)
def test_rewards(text: str, rewards: dict[str, float]) -> None:
    assert rewards_from(text) == rewards


@pytest.mark.parametrize(
    "text",
    [
        "",
        "good",
        "nan",
        "true",
        "{}",
        '{"a": "b"}',
        '{"a": true}',
        "[1]",
        '{"a": ' + "9" * 400 + "}",
    ],
)
def test_what_is_no_reward_fails_the_rollout(text: str) -> None:
    with pytest.raises(RolloutFailed, match=r"tests/test\.sh wrote the reward"):
        rewards_from(text)
