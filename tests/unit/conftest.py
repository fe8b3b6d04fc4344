"""Command lines that are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from grpo_core.settings import EXIT_USAGE

Refused = Callable[..., str]
Mistake = Callable[[Callable[[], None], str], str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Args: a call that ends with status 2, and its arguments. Returns what it writes to stderr."""

    def told(call: Callable[..., object], *arguments: Any, **named: Any) -> str:
        with pytest.raises(SystemExit) as ended:
            call(*arguments, **named)
        said = capsys.readouterr()
        assert (ended.value.code, said.out) == (EXIT_USAGE, ""), said.err
        return said.err

    return told


@pytest.fixture
def mistake(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> Mistake:
    """Args: a command and its arguments. Returns the one line that it writes."""

    def told(command: Callable[[], None], arguments: str) -> str:
        for name in ("REDIS_URL", "RUN_API_TOKEN", "VLLM_API_KEY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(sys, "argv", ["command", *arguments.split()])
        said = refused(command)
        assert said.count("\n") == 1, said
        assert "Input should be" not in said
        return said

    return told
