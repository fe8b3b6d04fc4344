"""Plain numbers are compared without `math-verify`, with the same verdict."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_env.maths.numbers import exact_verdict, read_number, respelled_pair

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
    "1080": ["1{,}080"],
    "-0.5": ["-.5"],
    "2.5": ["2.50%"],
}
"""`math-verify` alone finds these unequal."""

NO_NUMBERS = [
    *("", "$", ".", "-", "%", "eighteen", "1/2", "17 or 18", "17, 18", "1 080", "12,34", "1,0800"),
    *("--18", "-$-18", "1e3", "18 thousand", "18 pct", "2 pi", "2x", "18\n19"),
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
    assert exact_verdict("18 dollars", "18 euros") is exact_verdict("25%", "25%") is None


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
