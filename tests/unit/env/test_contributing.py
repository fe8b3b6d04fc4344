"""The task that CONTRIBUTING.md shows works as it stands there."""

from __future__ import annotations

import re
import sys
import textwrap
import types
from pathlib import Path

import pytest

from grpo_env.tasks import Answer, TaskOptions
from grpo_env.tasks.items import training_items

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "CONTRIBUTING.md"


def test_the_task_asks_and_grades(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"(?s)```python\n(.*?) *```", PAGE.read_text())
    module = types.ModuleType("reversing")
    monkeypatch.setitem(sys.modules, "reversing", module)
    exec(textwrap.dedent(block), vars(module))
    task = module.Reversing(TaskOptions())
    [item, *_] = training_items(task)
    word = item.row["word"]
    assert word in item.messages[0]["content"]
    assert task.reward(Answer(word[::-1]), item.row).parts == {"accuracy": 1.0}
    assert task.reward(Answer(word), item.row).parts == {"accuracy": 0.0}


def test_the_reward_in_the_readme_is_the_example() -> None:
    code = (ROOT / "examples" / "sums.py").read_text().partition("def ")[2]
    assert f"def {code}" in (ROOT / "README.md").read_text()
    assert len(code.splitlines()) <= 12
