"""Many rollouts in flight in one process: `python -m benchmarks.environment_bench.in_flight`.

Prints one reading as JSON. The inference server of `stub` holds every answer until all rollouts
wait for one, so they are all in flight at once.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast, get_args

import httpx
import psutil

from benchmarks.environment_bench.stub import stub
from benchmarks.train_bench.turns import Reading, json_of
from grpo_env.inference.pool import InferencePool
from grpo_env.rollout.chat_template import load_template
from grpo_env.rollout.engine import RolloutEngine
from grpo_env.rollout.grader import Grader
from grpo_env.rollout.groups import SamplingPlan
from grpo_env.rollout.task_code import TaskCode
from grpo_env.tasks import Answer, Message, Row, Split, State, Task, TaskOptions
from grpo_env.tasks.items import Item
from grpo_tiny_model.model import ensure_tiny_model

Kind = Literal["groups", "conversations"]
KINDS: tuple[Kind, ...] = get_args(Kind)
GROUP = 4
TURNS = 3
PROMPT_WORDS = 100
_DEADLINE_S = 600.0
_POLL_S = 0.2


class Long(Task):
    """One completion of a prompt of 100 words."""

    name = "long"
    blocks = False

    def rows(self, split: Split) -> Sequence[Row] | None:
        return [{"prompt": "count on: " + "seven " * PROMPT_WORDS}] if split == "train" else None

    def reward(self, answer: Answer, _row: Row) -> float:
        return float(answer.split()[0]) if answer else 0.0


class SlowDialogue(Long):
    """A conversation of `TURNS` completions; the task's answers have 100 words too."""

    name = "dialogue"
    max_turns = TURNS

    async def step(self, _state: State, _message: Answer) -> Sequence[Message] | None:
        return [{"role": "user", "content": "go on " * (PROMPT_WORDS // 2)}]


def measure(kind: Kind, rollouts: int) -> Reading:
    """In a process of its own, beside a server in another one."""
    module = "benchmarks.environment_bench.in_flight"
    with stub() as url:
        return json_of([sys.executable, "-m", module, url, kind, str(rollouts)])


async def reading(url: str, kind: Kind, rollouts: int) -> Reading:
    """Memory in MiB: `before_mib` the first rollout, `held_mib` with all in flight, `peak_mib` the
    most until all are graded. `cpu_ms`: CPU time per rollout."""
    task = (Long if kind == "groups" else SlowDialogue)(TaskOptions())
    template = load_template(str(ensure_tiny_model()))
    plan = SamplingPlan(GROUP, 1.0, 8192, max_completion_tokens=512, drop_equal_scores=False)
    async with InferencePool([url], _DEADLINE_S, rollouts) as pool:
        with TaskCode(_DEADLINE_S) as code:
            engine = RolloutEngine(pool, template, Grader({}, code))
            engine.prompt_ids(_item(task))  # the template is compiled at its first use
            before_mib, cpu_s = _resident_mib(), time.process_time()
            jobs = [
                asyncio.create_task(engine.roll_out(_item(task), plan))
                for _ in range(rollouts // GROUP)
            ]
            held_mib = 0.0
            for _ in range(1 if kind == "groups" else TURNS):
                await _until_held(url, rollouts)
                held_mib = _resident_mib()
                await _post(url + "/release")
            outcomes = await asyncio.gather(*jobs)
            cpu_s = time.process_time() - cpu_s
    lost = [found.lost for found in outcomes if found.lost is not None]
    assert not lost, lost[0]
    return {
        "before_mib": before_mib,
        "held_mib": held_mib,
        "peak_mib": _peak_mib(),
        "cpu_ms": cpu_s / rollouts * 1000,
    }


def _item(task: Task) -> Item:
    rows = task.rows("train")
    assert rows
    return Item(task, rows[0], task.prompt(rows[0]))


async def _until_held(url: str, rollouts: int) -> None:
    async with httpx.AsyncClient(timeout=_DEADLINE_S) as http:
        while (await http.get(url + "/held")).json()["held"] < rollouts:
            await asyncio.sleep(_POLL_S)


async def _post(url: str) -> None:
    async with httpx.AsyncClient(timeout=_DEADLINE_S) as http:
        (await http.post(url)).raise_for_status()


def _resident_mib() -> float:
    return float(psutil.Process().memory_info().rss / 2**20)


def _peak_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    [peak] = [line for line in lines if line.startswith("VmHWM:")]
    return int(peak.split()[1]) / 2**10


def allow_sockets() -> None:
    """One connection for each conversation."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    allow_sockets()
    found = asyncio.run(reading(sys.argv[1], cast(Kind, sys.argv[2]), int(sys.argv[3])))
    sys.stdout.write(json.dumps(found) + "\n")
