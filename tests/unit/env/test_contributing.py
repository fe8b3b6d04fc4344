"""The task that CONTRIBUTING.md shows works as it stands there."""

from __future__ import annotations

import re
import sys
import textwrap
import types
from pathlib import Path

import pytest

from grpo_env.tasks import Answer

PAGE = Path(__file__).parents[4] / "CONTRIBUTING.md"


def test_the_task_asks_and_grades(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"(?s)```python\n(.*?) *```", PAGE.read_text())
    module = types.ModuleType("reversing")
    monkeypatch.setitem(sys.modules, "reversing", module)
    exec(textwrap.dedent(block), vars(module))
    item = module.Reversing(seed=0).next_item()
    assert item.word in item.messages[0]["content"]
    assert item.grade(Answer(item.word[::-1])) == 1.0
    assert item.grade(Answer(item.word)) == 0.0
