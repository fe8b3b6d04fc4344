from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing import active_children

import pytest

from grpo_env.maths.math_grader import MathGrader, MathProcess


@pytest.fixture(scope="session")
def grader() -> Iterator[MathGrader]:
    """The real process, with a deadline that every sensible comparison meets."""
    before = set(active_children())
    with MathGrader(deadline_s=60.0) as grader:
        yield grader
    assert set(active_children()) <= before, "closing ends the process"


@pytest.fixture(scope="session")
def math_verify() -> Iterator[Callable[[str, str], bool]]:
    """Asks `math-verify` itself, also about plain numbers."""
    process = MathProcess()
    assert process.works()
    yield lambda answer, gold: process.compare(answer, gold, cpu_s=60.0)
    process.end()
