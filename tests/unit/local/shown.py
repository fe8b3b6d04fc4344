"""A screen that keeps its output for tests."""

from __future__ import annotations

import io

from rich.console import Console

from grpo_local.screen import Screen


class Shown(Screen):
    def __init__(self) -> None:
        self._facts, self._failures = io.StringIO(), io.StringIO()
        super().__init__(Console(file=self._facts), Console(file=self._failures))

    @property
    def out(self) -> str:
        return self._facts.getvalue()

    @property
    def err(self) -> str:
        return self._failures.getvalue()
