"""Rewards and tools in worker processes: real ones, started once for all tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from grpo_env.assembly import open_tasks, task_code
from grpo_env.rollout.task_code import TaskCode, TooSlow, UserCodeFailed
from grpo_env.settings import load_env_settings
from grpo_env.tasks import Answer, Graded, RolloutFailed, State, Task
from tests.support.process_table import is_alive
from tests.support.wait import wait_for

CODE = '''
import os, re, signal, subprocess, sys

from grpo_env.tasks import Graded, Task


def where(word: str) -> str:
    """Tell where this runs.

    Args:
        word: a word
    """
    return f"{word} {os.getpid()}"


def leave(word: str) -> str:
    """Leave.

    Args:
        word: a word
    """
    sys.exit(word)


def die(word: str) -> str:
    """Die as a process does that the kernel ends because memory ran out.

    Args:
        word: a word
    """
    os.kill(os.getpid(), signal.SIGKILL)


class Rewarded(Task):
    tools = [where, leave, die]

    def reward(self, answer, row):
        if answer == "alarm":  # as math_verify does
            signal.signal(signal.SIGALRM, lambda *_: None)
            signal.alarm(0)
        if answer == "late alarm":
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            return 1.0
        if answer == "program":
            child = subprocess.Popen(["sleep", "1000"])
            open(row["file"], "w").write(str(child.pid))
            child.wait()
        if answer == "exit":
            exit(3)
        if answer == "crash":
            os._exit(4)
        if answer == "error":
            raise KeyError("no such thing")
        if answer == "coroutine":
            return later()
        if answer.startswith("aaa"):  # holds the lock of the interpreter for days
            return float(bool(re.fullmatch(r"(\\w+\\s?)*", answer)))
        parts = {"finished": answer.finished, "tokens": len(answer.token_ids), "row": row["value"]}
        return Graded(parts, f"{os.getpid()} {answer.messages[-1]['content']}")


async def later():
    return 2.0
'''


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("task") / "mine.py"
    file.write_text(CODE)
    words = [f"{file}:Rewarded", "check", "--model=m", "--reward-workers=2"]
    return load_env_settings([*words, "--reward-deadline-s=3"])


@pytest.fixture(scope="module")
def task(settings: Any) -> Iterator[Task]:
    with open_tasks(settings) as tasks:
        yield tasks.tasks[0]


@pytest.fixture(scope="module")
def code(settings: Any) -> Iterator[TaskCode]:
    with task_code(settings) as code:
        yield code


TWO = Graded({"reward": 2.0})


def answer_of(text: str, finished: bool = False) -> Answer:
    messages = [{"role": "assistant", "content": text}]
    return Answer(text, finished=finished, messages=messages, token_ids=(1, 2), state=State({}))


async def test_an_answer_arrives_whole_in_another_process(code: TaskCode, task: Task) -> None:
    graded = await code.reward(task, answer_of("7"), {"value": 5.0})
    pid, said = graded.reason.split()
    assert graded.parts == {"finished": False, "tokens": 2, "row": 5.0}
    assert (said, int(pid) != os.getpid()) == ("7", True)


async def test_a_reward_may_need_the_main_thread_or_return_a_coroutine(
    code: TaskCode, task: Task
) -> None:
    assert (await code.reward(task, answer_of("alarm"), {"value": 1.0})).parts["row"] == 1.0
    assert await code.reward(task, answer_of("coroutine"), {}) == TWO


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("exit", "CodeStopped", "SystemExit: 3"),
        ("crash", "ProcessEnded", "the reward ended its process with status 4"),
        ("error", "KeyError", "'no such thing'"),
    ],
)
async def test_an_error_is_that_of_its_answer_alone(
    code: TaskCode, task: Task, text: str, kind: str, message: str
) -> None:
    with pytest.raises(UserCodeFailed) as failed:
        await code.reward(task, answer_of(text), {})
    assert (failed.value.kind, str(failed.value)) == (kind, message)
    if text == "error":
        assert "mine.py:" in failed.value.place
    assert await code.reward(task, answer_of("coroutine"), {}) == TWO


async def test_a_reward_that_holds_the_lock_is_ended(code: TaskCode, task: Task) -> None:
    with pytest.raises(TooSlow, match="did not end within 3 s; make it faster, load at import"):
        await code.reward(task, answer_of("a" * 60 + "!"), {})
    assert await code.reward(task, answer_of("coroutine"), {}) == TWO


async def test_the_programs_that_a_reward_started_end_with_it(
    code: TaskCode, task: Task, tmp_path: Path
) -> None:
    file = tmp_path / "pid"
    with pytest.raises(TooSlow):
        await code.reward(task, answer_of("program"), {"file": str(file)})
    child = int(file.read_text())
    await asyncio.to_thread(wait_for, lambda: not is_alive(child))


async def test_a_process_that_ends_between_two_calls_is_replaced(
    code: TaskCode, task: Task
) -> None:
    """For example one that the kernel ends for its memory; the restart is logged."""
    assert await code.reward(task, answer_of("coroutine"), {}) == TWO  # the first call starts them
    workers: Any = code._rewards
    for child in psutil.Process().children(recursive=True):
        if child.pid == os.getsid(child.pid) and child.ppid() != os.getpid():
            child.kill()
    await asyncio.to_thread(wait_for, lambda: not workers._pool.active)
    with capture_logs() as logs:
        assert await code.reward(task, answer_of("coroutine"), {}) == TWO
    assert [line["event"] for line in logs] == ["reward_workers.restarted"]


async def test_a_timer_of_one_call_ends_no_later_one(code: TaskCode, task: Task) -> None:
    for _ in range(4):
        assert await code.reward(task, answer_of("late alarm"), {}) == Graded({"reward": 1.0})
    await asyncio.sleep(0.5)  # what would end both processes
    with capture_logs() as logs:
        assert await code.reward(task, answer_of("coroutine"), {}) == TWO
    assert logs == []


def call_of(name: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"word": "x"}}}}</tool_call>'


async def test_a_tool_whose_process_is_killed_fails_the_rollout(code: TaskCode, task: Task) -> None:
    with pytest.raises(RolloutFailed, match="the tool die ended its process with status -9"):
        await code.step(task, State({}), answer_of(call_of("die")))


async def test_a_tool_runs_in_another_process(code: TaskCode, task: Task) -> None:
    messages = await code.step(task, State({}), answer_of(call_of("where") + call_of("leave")))
    assert messages is not None
    said, left = (message["content"] for message in messages)
    assert said.split()[0] == "x"
    assert int(said.split()[1]) != os.getpid()
    assert left == "error: SystemExit: x"


@pytest.mark.parametrize("name", ["gsm8k", "math"])
async def test_results_of_maths_that_are_no_plain_numbers_are_compared(
    name: str, tmp_path: Path
) -> None:
    """Forks of a process cannot share the one that runs math-verify."""
    (tmp_path / "train.jsonl").write_text(
        '{"question": "?", "problem": "?", "answer": "#### 72", "solution": "\\\\boxed{72}"}\n'
    )
    words = [name, "check", "--model=m", f"--data={tmp_path}", "--reward-workers=2"]
    settings = load_env_settings(words)
    with open_tasks(settings) as tasks, task_code(settings) as code:
        (task,) = tasks.tasks
        (row,) = task.rows("train") or ()
        for result in (r"\frac{144}{2}", r"\sqrt{5184}"):
            answer = answer_of(rf"<answer> \boxed{{{result}}} </answer>", finished=True)
            graded = await code.reward(task, answer, row)
            assert graded.parts["accuracy"] == 1.0
