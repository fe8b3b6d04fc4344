"""Comparisons in the real process, with the real library."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from grpo_env.math_grader import MathGrader, NotGraded

GENEROUS_S = 60.0
"""Where nothing hangs, a deadline only measures how busy the machine is."""
ENDLESS = "9^9^9^9^9"


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
    with MathGrader(GENEROUS_S) as grader:
        yield grader


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("18", "18", True),
        ("18.0", "18", True),
        ("1,080", "1080", True),
        ("$18", "18", True),
        ("18 dollars", "18", True),
        ("50%", "50", True),
        ("36/2", "18", True),
        (r"\boxed{18}", "18", True),
        (r"\boxed{18}. That was question 5", "18", True),
        (r"$\frac{36}{2}$", "18", True),
        ("-18", "18", False),
        ("17.999", "18", False),
        ("180", "18", False),
        ("17 or 18 or 19", "18", False),
        ("1, 2, 3, 18, 20", "18", False),
        ("0 < 18 < 100", "18", False),
        ("eighteen", "18", False),
        ("(((", "18", False),
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
    started = time.monotonic()
    with monkeypatch.context() as short:
        short.setattr(grader, "_deadline_s", 1.0)
        with pytest.raises(NotGraded, match="no verdict within 1 s"):
            grader.is_equal(ENDLESS, "18")
    assert time.monotonic() - started < 60
    assert grader.is_equal("18", "18")


def test_threads_may_ask_at_once(grader: MathGrader) -> None:
    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(lambda n: grader.is_equal(str(n), "18"), range(40)))
    assert [n for n, equal in enumerate(verdicts) if equal] == [18]


def test_closing_ends_the_process() -> None:
    before = set(multiprocessing.active_children())
    with MathGrader(GENEROUS_S) as grader:
        assert grader.is_equal("18", "18")
        (process,) = set(multiprocessing.active_children()) - before
        assert process.pid is not None
        assert psutil.pid_exists(process.pid)
    assert not psutil.pid_exists(process.pid), "not even as a zombie"
