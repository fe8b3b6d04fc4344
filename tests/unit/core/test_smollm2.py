"""The word `smollm2` for --model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from grpo_core.settings.machine import SMOLLM2, unusable_model


def test_a_directory_of_this_name_needs_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    Path(SMOLLM2).mkdir()
    Path(SMOLLM2, "config.json").touch()
    assert unusable_model(f"./{SMOLLM2}") is None
    assert unusable_model(SMOLLM2) is not None
