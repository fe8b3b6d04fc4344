"""Every objective keeps its definitions, and each of these mistakes is told by its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from grpo_core.tree.objectives import PRESETS, resolved
from grpo_trainer.checks.definitions import broken_definitions
from tests.silent_faults import in_the_trainer as faults
from tests.unit.trainer.checks.test_identities import OPTIONS


@pytest.mark.parametrize("name", PRESETS)
def test_every_objective_keeps_them_with_every_option(name: Any) -> None:
    for options in OPTIONS:
        assert [*broken_definitions(resolved(name, options))] == [], options


@pytest.mark.parametrize(
    ("fault", "options", "words"),
    [
        (faults.bounds_exchanged, {"clip_eps_high": 0.3}, "not clipped as --clip-eps 0.2"),
        (faults.ratio_to_itself, {}, "ratio is 1 for every token"),
        (faults.kl_turned, {"kl_coef": 0.1}, r"--kl-coef 0\.1 is -0\.01"),
        (faults.kl_left_out, {"kl_coef": 0.1}, r"--kl-coef 0\.1 is 0 "),
        (faults.advantages_of_batch, {}, r"with scores \[0\.0, 1\.0, 2\.0\]"),
    ],
)
def test_a_mistake_is_told(
    fault: Callable[[pytest.MonkeyPatch], None],
    options: dict[str, Any],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    [told, *_] = broken_definitions(resolved("grpo", options))
    assert re.search(words, told)
