from __future__ import annotations

from grpo_core.rollouts.record import printable


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("7 \x1b[2J\x07 ü 漢") == r"7 \x1b[2J\x07 ü 漢"
