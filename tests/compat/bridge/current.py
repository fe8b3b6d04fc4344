"""Checks with verifiers from 0.4. Run by test_verifiers.py in an environment of its own."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType
from typing import Any

import pytest
import verifiers.v1 as vf
from structlog.testing import capture_logs

from grpo_core.errors import ServiceUnavailable
from grpo_env.bridges import EnvironmentUnusable
from grpo_env.bridges.verifiers import VerifiersTask
from grpo_env.bridges.verifiers_v1 import HARNESS_ID, _config, _require_permission
from grpo_env.loading import verifiers_task
from grpo_env.tasks import ContextFull, RolloutFailed, TaskOptions
from tests.compat.bridge.both import CALL, SUM, row_of
from tests.unit.env.bridges.scripted import ScriptedDialogue


class Fine:
    @vf.reward
    async def fine(self) -> float:
        return 1.0


class Broken:
    @vf.reward
    async def broken(self) -> float:
        raise ZeroDivisionError("in the reward")


class Slow:
    @vf.reward
    async def slow(self) -> float:
        await asyncio.sleep(60.0)
        return 1.0


def made(*rewards: type) -> type[vf.Taskset]:
    """A module `made` with one task, "3+4=", and these rewards."""

    class MadeTask(*rewards, vf.Task[vf.TaskData]):  # type: ignore[misc]
        pass

    class MadeTaskset(vf.Taskset[MadeTask, vf.TasksetConfig]):
        def load(self) -> Any:
            return [MadeTask(vf.TaskData(prompt="3+4="), self.config.task)]

    module = sys.modules["made"] = ModuleType("made")
    module.MadeTaskset = MadeTaskset  # type: ignore[attr-defined]
    module.__all__ = ["MadeTaskset"]  # type: ignore[attr-defined]
    return MadeTaskset


def task_of(name: str = "made", **arguments: Any) -> VerifiersTask:
    return verifiers_task(name, TaskOptions(args=arguments))


async def test_rollouts_side_by_side_are_answered_by_their_own_dialogues() -> None:
    task = task_of("one_digit_sums")
    row = row_of(task, index=4)
    texts = ["4", "5", "4", "four"]
    dialogues = [ScriptedDialogue(text, delay_s=0.05 / (i + 1)) for i, text in enumerate(texts)]
    graded = await asyncio.gather(*(task.run(row, dialogue) for dialogue in dialogues))
    assert [g.score for g in graded] == [1.25, 0.25, 1.25, 0.0]
    task.close()


@pytest.mark.full
async def test_mistakes_in_calls_are_results_of_the_tool() -> None:
    task = task_of("calculator")
    unknown = "context_length_exceeded? " + CALL.replace("calculator_add", "divide")
    listed = CALL.replace('{"a": 1, "b": 1}', "[1, 1]")
    mistaken = ScriptedDialogue(unknown, listed, "2")
    assert (await task.run(row_of(task, SUM), mistaken)).parts["results"] == 2.0
    results = [message["content"] for message in mistaken.requests[-1] if message["role"] == "tool"]
    assert results[0] == "error: unknown tool 'divide'"
    assert results[1].startswith("error: tool arguments must be a JSON object, got list")
    task.close()


def test_the_users_configuration_counts_and_ours_fills_the_gaps() -> None:
    ours = _config("one_digit_sums", {"agent": {"max_turns": 3}}).agent
    assert (ours.harness.id, ours.runtime.type, ours.max_turns) == (HARNESS_ID, "subprocess", 3)
    docker = {"harness": {"id": "null"}, "runtime": {"type": "docker"}}
    theirs = _config("one_digit_sums", {"agent": docker, "taskset": {"largest": 2}})
    assert (theirs.agent.harness.id, theirs.agent.runtime.type) == ("null", "docker")
    assert theirs.taskset.largest == 2


async def test_a_reward_that_fails_is_an_error_and_no_reward_of_0() -> None:
    made(Broken, Fine)
    task = task_of()
    with pytest.raises(RolloutFailed, match="ZeroDivisionError: in the reward"):
        await task.run(row_of(task), ScriptedDialogue("7"))
    task.close()


async def test_a_reward_that_has_no_time_is_an_error_and_no_reward_of_0() -> None:
    made(Slow, Fine)
    task = task_of(agent={"timeout": {"scoring": 0.05}})
    with pytest.raises(RolloutFailed, match=r"not rated: .*slow"):
        await task.run(row_of(task), ScriptedDialogue("7"))
    task.close()


async def test_errors_of_the_dialogue_stay_what_they_are() -> None:
    class Gone(ScriptedDialogue):
        async def say(self, *_: Any, **__: Any) -> Any:
            raise ServiceUnavailable("the inference server is gone")

    task = task_of("one_digit_sums")
    with pytest.raises(ServiceUnavailable, match="is gone"):
        await task.run(row_of(task), Gone())
    with pytest.raises(ContextFull):
        await task.run(row_of(task), ScriptedDialogue())
    task.close()


async def test_several_agents_in_one_rollout_are_refused_by_name() -> None:
    made(Fine)
    task = task_of(id="best-of-n", n=2)
    with pytest.raises(EnvironmentUnusable, match="several agents in one rollout"):
        await task.run(row_of(task), ScriptedDialogue("7", "8"))
    task.close()


def test_tasks_without_end_need_a_limit() -> None:
    taskset = made(Fine)
    taskset.INFINITE = True
    with pytest.raises(EnvironmentUnusable, match=r'"select": {"limit": 1000}'):
        task_of().rows("train")
    assert len(task_of(select={"limit": 1}).rows("train") or ()) == 1


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("absent-env", {}, "no module absent_env"),
        ("one_digit_sums", {"args": {"taskset": {"smallest": 2}}}, "(?s)smallest"),
        ("one_digit_sums", {"args": {"retries": {"max_retries": 1}}}, "repeats failed rollouts"),
        (
            "one_digit_sums",
            {"args": {"agent": {"retries": {"max_retries": 1}}}},
            "repeats failed rollouts",
        ),
        ("one_digit_sums", {"eval_data": "rows.jsonl"}, "omit --eval-data, and use --task-args"),
        ("classic", {}, "load_environment, which verifiers .* no longer supports.*'verifiers<0.4'"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    name: str, options: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    classic = ModuleType("classic")
    classic.load_environment = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "classic", classic)
    with pytest.raises(EnvironmentUnusable, match=problem):
        verifiers_task(name, TaskOptions(**options))


BASH = {"harness": {"id": "bash"}}
ON_THIS_HOST = {"runtime": {"type": "subprocess"}}


def test_a_harness_that_the_user_chose_keeps_the_sandbox_of_verifiers() -> None:
    made(Fine)
    theirs = vf.resolve_env_config({"taskset": {"id": "made"}, "agent": BASH})
    ours = _config("made", {"agent": BASH})
    assert ours.agent.harness.id == theirs.agent.harness.id == "bash"
    assert ours.agent.runtime == theirs.agent.runtime
    assert not isinstance(ours.agent.runtime, vf.SubprocessConfig)


def test_commands_of_the_model_run_on_this_host_only_if_the_user_says_so() -> None:
    made(Fine)
    allowed = {"agent": BASH | ON_THIS_HOST}
    with capture_logs() as logs:
        task_of(**allowed)
    assert "verifiers.model_commands" in [line["event"] for line in logs]
    env = vf.load_environment(_config("made", allowed))  # as an environment's author may choose
    with pytest.raises(EnvironmentUnusable, match="runs commands that the model writes"):
        _require_permission(env, {})
