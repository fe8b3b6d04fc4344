"""What a terminal shows while a command waits."""

from __future__ import annotations

import io
from collections.abc import Callable

from rich.console import Console

from grpo_runs.screen import Screen
from tests.unit.runs.stand_ins import Shown


def silence_of(screen: Screen, seconds: int, at: Callable[[int], object]) -> None:
    """So many seconds pass. Args: at: called after each of them"""
    passed = 0

    def wait(_: float) -> bool:
        nonlocal passed
        passed += 1
        at(passed)
        return passed > seconds

    screen.break_silence(lambda: f"batch {passed}", wait)


def test_silence_is_broken_at_growing_intervals() -> None:
    screen = Shown()
    silence_of(screen, 170, lambda _: None)
    told = [f"  still waiting after {after} s: batch {after}" for after in (20, 40, 80, 160)]
    assert screen.out.splitlines() == told


def test_silence_begins_again_after_each_line() -> None:
    screen = Shown()
    at = {15: screen.line, 30: screen.warning}
    silence_of(screen, 51, lambda passed: at.get(passed, str)("news"))
    assert screen.out.splitlines() == ["news", "  still waiting after 20 s: batch 50"]


def test_a_warning_does_not_share_the_line_of_a_spinner() -> None:
    terminal = io.StringIO()
    both = (Console(file=terminal, force_terminal=True, color_system=None) for _ in range(2))
    screen = Screen(*both)
    with screen.activity("starting"):
        screen.warning("a fault")
    before, _, _ = terminal.getvalue().partition("warning: a fault")
    assert before.endswith(("\r", "\x1b[2K")), "the cursor is at the begin of an empty line"
