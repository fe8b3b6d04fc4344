"""Comparison with `math-verify` in its own process."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import active_children

import pytest

from grpo_env.maths import math_grader
from grpo_env.maths.math_grader import GraderUnusable, MathGrader, NotGraded


class Marked(str):
    """A string that cannot travel to another process."""

    def __reduce__(self) -> tuple[object, ...]:
        raise AssertionError("sent to the process")


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("1,080", "1080", True),
        (r"$\frac{36}{2}$", "18", True),
        ("0.5", r"\boxed{\frac{1}{2}}", True),
        (r"\boxed{\frac{\sqrt{8}}{2}}", r"\sqrt{2}", True),
        ("x + 1", r"\boxed{1 + x}", True),
        (r"\boxed{2 ab}", r"\boxed{2 cd}", False),
        (r"The answer is \frac{1}{2}", "0.5", True),
        ("17.999", "18", False),
        ("17 or 18 or 19", "18", False),
        ("0 < 18 < 100", "18", False),
        (r"\frac{\frac{", "18", False),
        (r"\boxed{", "18", False),
        ("", "18", False),
        (Marked("36/2"), Marked("18"), True),
        (r"3.0\times10^{-9}", r"4.0\times10^{-9}", False),
        (r"3.0\times10^{-9}", r"3\cdot10^{-9}", True),
        (r"\frac{1}{3000000}", r"\frac{1}{4000000}", False),
        ("3^{90}", "3^{90}+1", False),
        ("0.2500001", r"\frac{1}{4}", False),
        ("0.142857", r"\frac{1}{7}", True),
        ("0.6666666666666666", r"\frac{2}{3}", True),  # as Python prints it
        ("3.1415926", r"\pi", True),  # cut off
        ("3*10^-4", "0.0003", True),
        ("9.8 m/s^2", "9.8", True),
        ("5^{th}", "5", True),
        ("7!", "7", True),
        ("5!", "5!+1", False),
        ("0.14285", r"\frac{1}{7}", False),
        (r"(0.25, 2)", r"(\frac{1}{4}, 2)", True),
        (r"(0.2500001, 2)", r"(\frac{1}{4}, 2)", False),
    ],
)
def test_equal_is_what_a_mathematician_calls_equal(
    grader: MathGrader, answer: str, gold: str, equal: bool
) -> None:
    assert grader.is_equal(answer, gold) is equal


@pytest.mark.parametrize(
    "answer",
    [
        "9^9^9^9^9" + "0" * 200,
        r"\boxed{99999999999!}",  # one multiplication that no signal handler interrupts
    ],
)
def test_an_endless_computation_is_not_graded_and_the_next_one_is(
    grader: MathGrader, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    with monkeypatch.context() as short:
        short.setattr(grader, "_deadline_s", 0.2)
        with pytest.raises(NotGraded, match=r"was not graded within 0\.2 s of CPU") as refusal:
            grader.is_equal(answer, "18")
    assert len(str(refusal.value)) < 200, "the message shows only the start of the answer"
    assert grader.is_equal("36/2", "18")


@pytest.mark.parametrize("piece", [r"\boxed{", "9", "\x00"])
def test_an_answer_of_100_kb_is_wrong_or_not_graded(
    grader: MathGrader, monkeypatch: pytest.MonkeyPatch, piece: str
) -> None:
    monkeypatch.setattr(grader, "_deadline_s", 0.1)
    answer = piece * (100_000 // len(piece))
    with suppress(NotGraded):
        assert not grader.is_equal(answer, "18")


def test_threads_may_ask_at_once(grader: MathGrader) -> None:
    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(lambda n: grader.is_equal(f"{n}/2", "18"), range(60)))
    assert [n for n, equal in enumerate(verdicts) if equal] == [36]


class NeverStarts:
    def __init__(self) -> None:
        self.ended = False

    def works(self) -> bool:
        raise ChildProcessError("the process ended with exit code 1")

    def end(self) -> None:
        self.ended = True


def test_a_grader_that_does_not_start_says_how_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = NeverStarts()
    monkeypatch.setattr(math_grader, "MathProcess", lambda: process)
    with pytest.raises(GraderUnusable, match=r"exit code 1\); install math-verify: pip install"):
        MathGrader()
    assert process.ended


def test_a_killed_process_is_replaced_and_a_closed_grader_compares_numbers_only() -> None:
    before = set(active_children())
    grader = MathGrader()
    (process,) = set(active_children()) - before
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert grader.is_equal("36/2", "18")

    grader.close()
    grader.close()
    assert set(active_children()) <= before
    assert grader.is_equal("18", "18")
    with pytest.raises(NotGraded, match="the grader is closed"):
        grader.is_equal("36/2", "18")
