"""Agents of a user, as programs and as functions, through the engine and a scripted server."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_core.tree.environment_values import AGENT
from grpo_env.bridges.agent_program import program_words, readable_places, run_program
from grpo_env.loading import TaskUnusable, find_task
from grpo_env.pacing import RolloutsFail
from grpo_env.rollout.chat_template import ChatTemplate, TokenizerUnusable, load_template
from grpo_env.rollout.groups import FailureReason
from grpo_env.rollout.producer import GroupProducer
from grpo_env.sandbox.code import VARIABLE
from grpo_env.settings import load_env_settings
from grpo_env.tasks import Task, TaskOptions
from grpo_env.tasks.item_stream import ItemStream
from grpo_env.tasks.items import Item, training_items
from tests.support.wait import wait_for_async
from tests.unit.env.rollout.rig import PLAN, engine_on, lost, prompts, sample, submitted
from tests.unit.env.rollout.test_conversation import SAID, scripted
from tests.unit.env.sandbox.conftest import bubblewrap as bubblewrap

PLAN = replace(PLAN, group_size=1, drop_equal_scores=False, max_token_length=400)
PROGRAM = """
import json, os, sys, urllib.request

def ask(*messages):
    body = {"messages": [{"role": role, "content": text} for role, text in messages]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

row = json.load(sys.stdin)
assert row == json.loads(os.environ["GRPO_ROW"])
assert not {"RUN_API_TOKEN", "HF_TOKEN", "GRPO_VLLM_API_KEY"} & {*os.environ}
"""
TWICE = """
first = ask(("user", row["prompt"]))
print(ask(("user", row["prompt"]), ("assistant", first), ("user", "sure?")), "said last")
"""
REWARD = """
def reward(answer, row):
    assert answer.state["output"] == "8 said last\\n", answer.state
    assert [m["role"] for m in answer.messages] == ["user", "assistant"] * 2
    return float(answer == row["answer"])
"""


@pytest.fixture(autouse=True)
def _on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "none")


@pytest.fixture
def template(tokenizer_dir: Path) -> ChatTemplate:
    return load_template(str(tokenizer_dir))


@pytest.fixture
def agent(tmp_path: Path) -> Callable[..., Task]:
    """The task with a program, or with a function, that the text defines."""

    directory = tmp_path / "program"
    directory.mkdir()  # which the user of a sandbox may read, and `tmp_path` not

    def made(text: str, reward: str = "def reward(answer, row): return 1.0", **how: Any) -> Task:
        program = directory / "program.py"
        program.write_text(text)
        (tmp_path / "own.py").write_text(reward)
        (tmp_path / "rows.jsonl").write_text('{"prompt": "3+4=", "answer": "8"}\n')
        command = shlex.join([sys.executable, str(program)])
        if "def agent" in text:
            how = {"command": None, "function": str(program), **how}
        limits = {"calls": 4, "deadline_s": 60.0, "rollouts": 4, "sequences": 1}
        args = {"command": command, "reward": f"{tmp_path}/own.py:reward", **limits, **how}
        options = TaskOptions(data=str(tmp_path / "rows.jsonl"), args=args)
        return find_task(AGENT)(options)

    return made


async def test_a_program_is_trained_on_the_very_tokens_that_were_sampled(
    agent: Any, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RUN_API_TOKEN", "HF_TOKEN", "GRPO_VLLM_API_KEY"):
        monkeypatch.setenv(name, "secret")
    task = agent(PROGRAM + TWICE, REWARD)
    outcome, server = await sample(scripted("7", "8"), task, PLAN, template=template)
    task.close()
    first, second = prompts(server)
    assert second[: len(first) + 3] == first + SAID
    group = submitted(outcome)
    assert group.tokens == [second + SAID]
    assert group.scores == [1.0]


SEES = """
from pathlib import Path
text = f"{Path('.').absolute()} {Path(__file__).parents[1].joinpath('rows.jsonl').exists()}"
print(text, len(os.listdir("/proc")) < 100, ask(("user", text)))
"""


@pytest.mark.usefixtures("bubblewrap")
async def test_by_default_a_program_reaches_nothing_but_its_files_and_the_policy(
    agent: Any, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    reward = (
        'def reward(answer, row): return float(answer.state["output"] == "/tmp False True 7\\n")'
    )
    task = agent(PROGRAM + SEES, reward)
    outcome, _ = await sample(scripted("7"), task, PLAN, template=template)
    task.close()
    assert submitted(outcome).scores == [1.0]


@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.parametrize("kind", ["bubblewrap", "none"])
async def test_python_is_that_of_the_environment_and_no_shim_on_path(
    agent: Any,
    template: ChatTemplate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setenv(VARIABLE, kind)
    (tmp_path / "python").write_text("#!/bin/sh\nexit 7\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    command = f"python {tmp_path}/program/program.py"
    reward = f'def reward(answer, row): return float(answer.state["output"] == "{sys.prefix}\\n")'
    task = agent(PROGRAM + "ask(('user', 'q')); print(sys.prefix)", reward, command=command)
    outcome, _ = await sample(scripted("7"), task, PLAN, template=template)
    task.close()
    assert submitted(outcome).scores == [1.0]


@pytest.mark.parametrize("program", ["/bin/sh", "sh", "/agent"])
def test_a_sandbox_shows_the_files_of_a_command_and_never_the_whole_host(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "run.py").touch()
    monkeypatch.chdir(tmp_path)
    words = [program, "run.py", "--mode", "test", "/", "/dev/null"]
    own = [Path("/agent")] if program == "/agent" else []
    assert readable_places(words, "bubblewrap") == sorted([*own, tmp_path])
    assert readable_places(words, "docker:image") == [tmp_path]
    assert program_words(words, "bubblewrap")[1:4] == [f"{tmp_path}/run.py", "--mode", "test"]


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_function_is_an_agent_too(agent: Any, template: ChatTemplate, kind: str) -> None:
    text = f"""
import os
{kind} agent(row, client):
    os.environ.update(OPENAI_BASE_URL=client.base_url, OPENAI_API_KEY=client.api_key)
    assert client.model == "policy"
    return ask(("user", row["prompt"])) + "!"
"""
    text = PROGRAM.partition("row =")[0] + text
    reward = 'def reward(answer, row): return float(answer.state["output"] == "7!")'
    task = agent(text, reward)
    outcome, _ = await sample(scripted("7"), task, PLAN, template=template)
    task.close()
    assert submitted(outcome).scores == [1.0]


async def test_rollouts_of_an_async_function_share_an_event_loop(
    agent: Any, template: ChatTemplate
) -> None:
    text = """
import asyncio
loops = set()
async def agent(row, client):
    loops.add(asyncio.get_running_loop())
    os.environ.update(OPENAI_BASE_URL=client.base_url, OPENAI_API_KEY=client.api_key)
    await asyncio.to_thread(ask, ("user", row["prompt"]))
    return len(loops)
"""
    text = PROGRAM.partition("row =")[0] + text
    task = agent(text, 'def reward(answer, row): return float(answer.state["output"])')
    for _ in range(2):
        outcome, _ = await sample(scripted("7"), task, PLAN, template=template)
        assert submitted(outcome).scores == [1.0]
    task.close()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import sys; sys.exit('no luck')", r"(?s)program.py\) ended with status 1.*no luck"),
        ("import os; os.kill(os.getpid(), 9)", "ended with status 137"),
        ("print('idle')", "ended without a call; its output: idle"),
        ("def agent(row, client): {}['x']", r"failed: .*program.py line 1: KeyError: 'x'"),
        ("def agent(row, client): return object()", "it returned object, not values of JSON"),
        ("async def agent(row, client): exit()", "failed: .*CodeStopped: SystemExit"),
    ],
)
async def test_an_agent_that_fails_loses_its_group_by_name(
    agent: Any, template: ChatTemplate, text: str, problem: str
) -> None:
    task = agent(text)
    outcome, _ = await sample(scripted("7"), task, PLAN, template=template)
    task.close()
    found = lost(outcome)
    assert found.reason is FailureReason.FAILED_ROLLOUT
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(found.detail)


async def test_agents_that_fail_end_the_environment_and_the_reward_is_not_blamed(
    agent: Any, template: ChatTemplate
) -> None:
    task = agent("def agent(row, client): {}['x']")
    items = ItemStream([(training_items(task), 1.0)], seed=0)
    settings = load_env_settings(["arithmetic", "serve", "--model=m"])
    async with engine_on(scripted("7"), template=template) as (engine, _):
        api: Any = None
        producer = GroupProducer(settings, items, engine, api)
        for _ in range(7):
            await producer.produce(PLAN, step=0)
        with pytest.raises(RolloutsFail, match="KeyError"):
            await producer.produce(PLAN, step=0)
    task.close()


STRICT = "{% if messages[-1].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


async def test_messages_that_the_template_refuses_are_a_refused_call(
    agent: Any, template: ChatTemplate
) -> None:
    template.tokenizer.chat_template = STRICT + template.tokenizer.chat_template
    text = """
import urllib.error
first = ask(("user", "q"))
try:
    ask(("user", "q"), ("system", "x"))
except urllib.error.HTTPError as error:
    print(error.code)
"""
    reward = 'def reward(answer, row): return float(answer.state["output"] == "400\\n")'
    task = agent(PROGRAM + text, reward)
    outcome, _ = await sample(scripted("7"), task, PLAN, template=template)
    task.close()
    assert submitted(outcome).scores == [1.0]


async def test_an_error_of_the_run_ends_the_agent(agent: Any, template: ChatTemplate) -> None:
    template.tokenizer.chat_template = "{{ messages[0].content }}"  # hides tools
    tools = "{'type': 'function', 'function': {'name': 'add'}}"
    text = PROGRAM.replace('"messages":', f'"tools": [{tools}], "messages":')
    text += "try: ask(('user', 'q'))\nfinally:\n    import time; time.sleep(600)"
    task = agent(text, deadline_s=600.0)
    with pytest.raises(TokenizerUnusable, match="does not show its tools"):
        await sample(scripted("7"), task, PLAN, template=template)
    task.close()


async def test_a_limit_that_a_call_reached_hides_no_deadline(
    agent: Any, template: ChatTemplate
) -> None:
    text = (
        PROGRAM
        + """
import time
ask(("user", "q"))
try:
    ask(("user", "q"))
finally:
    time.sleep(600)
"""
    )
    task = agent(text, calls=1, deadline_s=1.0)
    outcome, _ = await sample(scripted("7"), task, PLAN, template=template)
    task.close()
    assert "did not end within 1 s" in lost(outcome).detail


async def test_a_function_that_finds_no_thread_is_told_from_one_that_is_slow(
    agent: Any, template: ChatTemplate
) -> None:
    task = agent("import time\ndef agent(row, client): time.sleep(600)", deadline_s=0.1, rollouts=1)
    problems = []
    for _ in range(2):
        outcome, _ = await sample(scripted("7"), task, PLAN, template=template)
        problems.append(lost(outcome).detail)
    task.close()
    assert "did not end within" in problems[0]
    assert "did not begin: all threads (--agent-rollouts 1) have calls" in problems[1]


@pytest.mark.parametrize(
    "text",
    [
        "import time; time.sleep(600)",
        "import asyncio\nasync def agent(row, client): await asyncio.sleep(600)",
        "import time\ndef agent(row, client): time.sleep(600)",
    ],
)
async def test_an_agent_that_takes_too_long_is_a_failed_rollout(
    agent: Any, template: ChatTemplate, text: str
) -> None:
    task = agent(text, deadline_s=0.2)
    outcome, _ = await sample(scripted("7"), task, PLAN, template=template)
    task.close()
    found = lost(outcome)
    assert found.reason is FailureReason.FAILED_ROLLOUT
    assert "did not end within 0.2 s, the limit of --agent-deadline-s" in found.detail


async def test_a_limit_that_a_call_reached_hides_no_kill(
    agent: Any, template: ChatTemplate
) -> None:
    ask, kill = "ask(('user', 'q'))", "import os; os.kill(os.getpid(), 9)"
    text = f"{PROGRAM}\n{ask}\ntry: {ask}\nfinally: {kill}"
    task = agent(text, calls=1)
    outcome, _ = await sample(scripted("7"), task, PLAN, template=template)
    task.close()
    assert "ended with status 137" in lost(outcome).detail


STARTS_ANOTHER = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"])
with open(sys.argv[1], "w") as file:
    file.write(f"{child.pid}\\n")
child.wait()
"""


async def test_a_program_is_ended_with_what_it_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    words = [sys.executable, "-c", STARTS_ANOTHER, str(file)]
    running = asyncio.create_task(run_program(words, b"", os.environ, 600.0))
    await wait_for_async(lambda: file.exists() and file.read_text().endswith("\n"))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await wait_for_async(lambda: not runs(int(file.read_text())))


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


async def test_a_limit_ends_a_rollout_that_is_graded_with_what_was_said(
    agent: Any, template: ChatTemplate
) -> None:
    text = PROGRAM + "while True: ask(('user', 'again'))"
    reward = (
        "def reward(answer, row): return {'said': float(answer == '7' and not answer.finished)}"
    )
    task = agent(text, reward, calls=2, sequences=2)
    plan = replace(PLAN, max_sequences=2)
    outcome, server = await sample(scripted("7"), task, plan, template=template)
    task.close()
    assert len(prompts(server)) == 2
    group = submitted(outcome)
    assert group.scores == [1.0, 1.0]
    assert group.overrides
    assert [override["finish_reason"] for override in group.overrides] == ["stop", "length"]


async def test_the_length_of_a_row_is_no_length_of_a_prompt(
    agent: Any, template: ChatTemplate
) -> None:
    task = agent("async def agent(row, client): pass")
    items = ItemStream([([Item(task, {}, "x" * 1000)], 1.0)], seed=0)
    settings = load_env_settings(["arithmetic", "serve", "--model=m"])
    async with engine_on(scripted("7"), template=template) as (engine, _):
        api: Any = None
        GroupProducer(settings, items, engine, api).skip_long_prompts(PLAN)
    assert len(items) == 1


def test_a_function_that_cannot_be_called_is_found_before_the_first_rollout(agent: Any) -> None:
    with pytest.raises(TaskUnusable, match=r"cannot be called as agent\(row, client\)"):
        agent("def agent(row): pass").rows("train")


def test_the_reward_may_be_a_task_with_data_of_its_own() -> None:
    limits = {"calls": 1, "deadline_s": 1.0, "rollouts": 1, "sequences": 3}
    args = {"command": "true", "reward": "arithmetic", "level": 2, **limits}
    task = find_task(AGENT)(TaskOptions(args=args))
    rows = task.rows("train")
    assert rows
    assert task.prompt(rows[0])
    assert task.max_sequences == 3
    with pytest.raises(TaskUnusable, match="needs a reward"):
        find_task(AGENT)(TaskOptions(args={**args, "reward": None, "function": ""}))
