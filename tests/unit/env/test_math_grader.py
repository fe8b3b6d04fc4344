"""Comparisons in the real process, with the real library."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import active_children

import pytest

from grpo_env.math_grader import MathGrader, NotGraded

ENDLESS = "9^9^9^9^9"


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
    """Its deadline is never reached by a machine that is merely busy."""
    before = set(active_children())
    with MathGrader(deadline_s=60.0) as grader:
        yield grader
    assert set(active_children()) <= before, "closing ends the process"


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("1,080", "1080", True),
        ("$18", "18", True),
        ("36/2", "18", True),
        (r"$\frac{36}{2}$", "18", True),
        ("17.999", "18", False),
        ("17 or 18 or 19", "18", False),
        ("0 < 18 < 100", "18", False),
        (r"\frac{\frac{", "18", False),
    ],
)
def test_equal_is_what_a_mathematician_calls_equal(
    grader: MathGrader, answer: str, gold: str, equal: bool
) -> None:
    assert grader.is_equal(answer, gold) is equal


def test_an_endless_computation_is_not_graded_and_the_next_one_is(
    grader: MathGrader, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as short:
        short.setattr(grader, "_deadline_s", 1.0)
        with pytest.raises(NotGraded, match="no verdict within 1 s"):
            grader.is_equal(ENDLESS, "18")
    assert grader.is_equal("18", "18")


def test_threads_may_ask_at_once(grader: MathGrader) -> None:
    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(lambda n: grader.is_equal(str(n), "18"), range(40)))
    assert [n for n, equal in enumerate(verdicts) if equal] == [18]
