"""The example of the documentation rates functions of the model, in the processes of rewards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from grpo_env.assembly import open_tasks, task_code
from grpo_env.sandbox import Sandbox
from grpo_env.settings import load_env_settings
from grpo_env.tasks import Answer, State

EXAMPLE = Path(__file__).parents[4] / "examples" / "functions.py"
ANSWERS = {
    "def f(x):\n    return x + 2": (1.0, 0.1),
    "Of course:\n```python\ndef f(x):\n    return x\n```": (0.0, 0.1),
    "import sys; sys.exit(0)": (0.0, 0.0),
    "I do not know": (0.0, 0.0),
}
ROW = {"prompt": "", "tests": ["assert f(1) == 3", "assert f(-2) == 0"]}


def rated(sandbox: str) -> list[tuple[float | None, ...]]:
    words = [f"{EXAMPLE}:Functions", "check", "--model=m", "--reward-workers=2"]
    settings = load_env_settings([*words, f"--sandbox={sandbox}"])

    async def all_of() -> list[tuple[float | None, ...]]:
        with open_tasks(settings) as tasks, task_code(settings) as code:
            (task,) = tasks.tasks
            answers = [Answer(text, state=State({})) for text in ANSWERS]
            graded = await asyncio.gather(*(code.reward(task, one, ROW) for one in answers))
            return [tuple(one.parts.values()) for one in graded]

    return asyncio.run(all_of())


def test_tests_rate_the_function(bubblewrap: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_SANDBOX", "auto")  # restored at the end
    assert rated(bubblewrap.kind) == [*ANSWERS.values()]
