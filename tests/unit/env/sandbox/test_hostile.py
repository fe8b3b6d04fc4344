"""What a hostile program cannot do in bubblewrap. tests/containers/test_sandbox.py tries the same
in Docker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_env.sandbox import Ended
from tests.support.hostile import ATTACKS, Attack, busy

_ATTACKS = [
    pytest.param(attack, marks=[pytest.mark.full] if attack is busy else []) for attack in ATTACKS
]
"""One takes a second of CPU time."""


@pytest.mark.parametrize("attack", _ATTACKS)
def test_an_attack_achieves_nothing(
    attack: Attack, python: Callable[..., Ended], tmp_path: Path
) -> None:
    attack(python, tmp_path)
