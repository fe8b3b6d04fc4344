"""Plain numbers are compared without `math-verify`, with the same verdict; all else with it, in its
own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal
from multiprocessing import active_children
from unittest.mock import create_autospec

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_env.maths import math_grader
from grpo_env.maths.math_grader import GraderUnusable, MathGrader, MathProcess, NotGraded
from grpo_env.maths.numbers import exact_verdict, read_number, respelled_pair
from tests.support.wait import wait_for


@pytest.fixture(scope="session")
def grader() -> Iterator[MathGrader]:
    """The real process, with a deadline that every sensible comparison meets."""
    before = set(active_children())
    with MathGrader(deadline_s=60.0) as grader:
        yield grader
    assert set(active_children()) <= before, "closing ends the process"


@pytest.fixture(scope="session")
def math_verify(grader: MathGrader) -> Callable[[str, str], bool]:
    """Asks `math-verify` itself, also about plain numbers."""
    return lambda answer, gold: grader._process.compare(answer, gold, cpu_s=60.0)


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
        pytest.param("9^9^9^9^9" + "0" * 200, marks=pytest.mark.full),
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


def test_a_grader_that_does_not_start_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(active_children())
    ended = create_autospec(MathProcess._receive, side_effect=ChildProcessError("exit code 1"))
    monkeypatch.setattr(MathProcess, "_receive", ended)
    with pytest.raises(GraderUnusable, match=r"exit code 1\); install math-verify: pip install"):
        MathGrader()
    assert set(active_children()) <= before


def test_a_killed_process_is_replaced(grader: MathGrader) -> None:
    process = grader._process._process
    process.kill()
    process.join()
    assert grader.is_equal("36/2", "18")
    assert grader._process._process is not process


def test_a_closed_grader_compares_numbers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_grader, "MathProcess", create_autospec(MathProcess))
    grader = MathGrader()
    grader.close()
    grader.close()
    assert grader.is_equal("18", "18")
    with pytest.raises(NotGraded, match="the grader is closed"):
        grader.is_equal("36/2", "18")


def test_an_answer_whose_comparison_is_killed_gets_no_score(grader: MathGrader) -> None:
    answers = ThreadPoolExecutor(1)
    before = psutil.Process(grader._process._process.pid).cpu_times().user
    verdict = answers.submit(grader.is_equal, r"\boxed{99999999999!}", "18")
    wait_for(lambda: psutil.Process(grader._process._process.pid).cpu_times().user > before)
    grader._process._process.kill()
    with pytest.raises(NotGraded, match=r"crashed the grading process: .* exit code -9"):
        verdict.result()
    assert grader.is_equal("36/2", "18")


MathVerify = Callable[[str, str], bool]

SPELLINGS = {
    "1080": ["1,080", "$1080", "1080.", "1080.00", "01080", "1080 dollars", "1080 km/h", "1080€"],
    "-18": ["$-18", "-18 degrees Celsius"],
    "0.5": [".5", "$0.50", "0.5 square feet", r"\boxed{0.5\text{ cm}}"],
    "25": ["25%", r"\boxed{25\%}", r"\boxed{25}", r"$25$", r"\(25\)", r"\boxed{\$25}"],
    "0.25": ["25%"],
}
"""Both comparisons find these equal."""

MISREAD = {
    "18": ["+18", "**18**", r"\$18", r"\boxed{18 km/h}", r"\boxed{18.}"],
    "-18": ["-$18", "- 18", "\N{MINUS SIGN}18"],
    "1080": ["1{,}080", "1.08e3", "1.08E+03"],
    "0.0000001": ["1e-7", "1e-07"],
    "-0.5": ["-.5"],
    "2.5": ["2.50%"],
}
"""`math-verify` alone finds these unequal."""

NO_NUMBERS = [
    *("", "$", ".", "-", "%", "eighteen", "1/2", "17 or 18", "17, 18", "1 080", "12,34", "1,0800"),
    *("--18", "-$-18", "e3", "18 thousand", "18 pct", "2 pi", "2x", "18\n19"),
    "\N{SUPERSCRIPT TWO}",
    *(r"\boxed{17} \boxed{18}", r"\boxed{}", r"\frac{36}{2}", "9" * 200),
]


def pairs(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(answer, gold) for gold, answers in table.items() for answer in answers]


@pytest.mark.parametrize(("answer", "gold"), pairs(SPELLINGS))
def test_equal_numbers_in_other_spellings(math_verify: MathVerify, answer: str, gold: str) -> None:
    assert exact_verdict(answer, gold) is True
    assert math_verify(answer, gold)
    assert exact_verdict(answer, gold + "1") is False
    assert not math_verify(answer, gold + "1")


@pytest.mark.parametrize(("answer", "gold"), pairs(MISREAD))
def test_spellings_that_math_verify_misreads(
    math_verify: MathVerify, answer: str, gold: str
) -> None:
    assert exact_verdict(answer, gold) is True
    assert not math_verify(answer, gold), "no longer misread: move the spelling to SPELLINGS"


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_everything_else_is_left_to_math_verify(text: str) -> None:
    assert read_number(text) is None
    assert exact_verdict(text, "18") is None
    assert exact_verdict("18", text) is None


def test_numbers_whose_unit_may_matter_are_left_to_math_verify() -> None:
    assert exact_verdict("18 dollars", "18 euros") is exact_verdict("25", "25%") is None


@pytest.mark.parametrize(
    ("answer", "gold", "verdict"),
    [
        *(("true", "True", True), (r"\boxed{Yes}.", "True", True), ("no", "false", True)),
        *(("no", "True", False), ("on", "no", False), ("maybe", "yes", False)),
        *(("2024-05-01", "2024-05-01", True), (r"\boxed{2024-05-01}", "2024-05-01", True)),
        *(("2018", "2024-05-01", False), ("2024-04-02", "2024-05-01", False)),
        *(("p - q", r"\boxed{p - q}", True), ("(1,2)", "(1,2)", True), ("Ja", "$Ja$", True)),
    ],
)
def test_equal_texts_truth_values_and_dates(answer: str, gold: str, verdict: bool) -> None:
    """`math-verify` would read a date as a difference, and a word as a product of letters."""
    assert exact_verdict(answer, gold) is verdict


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("0.3333333", "0.333333"),
        ("0.5000001", "0.5"),
        ("0.0000002", "0.0000001"),
        ("12345678901234567890", "12345678901234567891"),
        ("0.00001%", "0"),
    ],
)
def test_numbers_are_equal_only_if_all_their_digits_are(answer: str, gold: str) -> None:
    assert exact_verdict(answer, gold) is False
    assert exact_verdict(gold, gold) is True


DECIMALS = st.decimals(-(10**9), 10**9, places=None, allow_nan=False).map(
    lambda number: format(round(number, 6).normalize(), "f")
)


@given(answer=DECIMALS, gold=DECIMALS, ulps=st.integers(-2, 2), near=st.booleans())
def test_both_comparisons_agree(
    math_verify: MathVerify, answer: str, gold: str, ulps: int, near: bool
) -> None:
    if near:
        answer = format(Decimal(gold) + ulps * Decimal("0.000001"), "f")
    verdict = exact_verdict(answer, gold)
    assert verdict is (Decimal(answer) == Decimal(gold))
    assert math_verify(*respelled_pair(answer, gold)) is verdict
