from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import active_children

import pytest

from grpo_env.maths.math_grader import MathGrader, MathProcess
from grpo_env.maths.numbers import respelled_pair


@pytest.fixture(scope="session")
def grader() -> Iterator[MathGrader]:
    """The real process, with a deadline that every sensible comparison meets."""
    before = set(active_children())
    with MathGrader(deadline_s=60.0) as grader:
        yield grader
    assert set(active_children()) <= before, "closing ends the process"


class MathVerify:
    """Asks `math-verify` itself, also about plain numbers."""

    def __init__(self) -> None:
        self._process = MathProcess()
        assert self._process.works()

    def raw(self, answer: str, gold: str) -> bool:
        return self._process.compare(answer, gold, cpu_s=60.0)

    def respelled(self, answer: str, gold: str) -> bool:
        return self.raw(*respelled_pair(answer, gold))

    def close(self) -> None:
        self._process.end()


@pytest.fixture(scope="session")
def math_verify() -> Iterator[MathVerify]:
    process = MathVerify()
    yield process
    process.close()
