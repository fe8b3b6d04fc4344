"""Reads plain numbers in the spellings that models use, and compares them exactly.

This saves most calls of `math-verify`, which needs about a millisecond per comparison. It also
makes `math-verify` understand spellings that it misreads: `-$18`, `+18`, `**18**`, `1{,}080`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

_LONGEST_CHARS = 96

_WRAPPERS = (
    *((r"\boxed{", "}"), ("**", "**")),
    *(("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")),
)
_RESPELLED = (("\u2212", "-"), ("{,}", ","), (r"\!", ""), (r"\,", " "), ("\\ ", " "), ("~", " "))
_TEXT = re.compile(r"\\(?:text|textrm|mathrm)\{([^{}]*)\}")

_LATEX = re.compile(r"[\\^]|_\{")
"""Signs without which a text is no LaTeX. `math-verify` reads only the 10 of a bare `10^{-8}`."""
_FACTORIAL = re.compile(r"[0-9a-z)]!")
_BARE_EXPONENT = re.compile(r"\^\s*(-\s*[0-9a-zA-Z]+)")
_ORDINAL = re.compile(r"\^\{?(?:\\text\{|\\mathrm\{)?(?:st|nd|rd|th)\}*")
_WITH_UNIT = re.compile(r"[-+]?[0-9][0-9.,]* ?[A-Za-z]")
"""`5 m^2`: a number with a unit, of which the number counts."""

# Words that change the value are no units.
_UNIT = (
    r"(?! (?:pi|pct|percent\w*|hundred|thousand|million|billion|trillion|dozen|half)\b)"
    r" [A-Za-z]{2,}(?:/[A-Za-z]+)?(?: [A-Za-z]{2,}){0,2}"
)
_NUMBER = re.compile(
    r"(?P<sign>[-+]?) ?(?:\\?[$€£¥])?(?P<inner_sign>[-+]?)"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?P<decimals>\.[0-9]+)?"
    r"(?P<exponent>(?<=[0-9])[eE][-+]?[0-9]{1,3})?"
    rf"(?: ?\\?[$€£¥]| ?\\?(?P<percent>%)|(?P<unit>{_UNIT}))?[.,]?"
)


@dataclass(frozen=True)
class PlainNumber:
    """A number in digits.

    `digits`: the number as `-1080.5`; without sign `+`, currency and thousands separators.
    `percent`: a percent sign follows. `unit`: words such as `dollars` or `km/h` follow.
    """

    digits: str
    percent: bool
    unit: bool

    @property
    def text(self) -> str:
        """The number in the spelling that `math-verify` reads best."""
        return self.digits + "%" * self.percent


def read_number(text: str) -> PlainNumber | None:
    """None if the text is anything else than one number, for example a fraction or `1,08`."""
    if len(text) > _LONGEST_CHARS:
        return None
    found = _NUMBER.fullmatch(_respelled(_unwrapped(text.strip())))
    if not found or not (found["whole"] or found["decimals"]):
        return None
    if found["sign"] and found["inner_sign"]:
        return None
    minus = "-" * ("-" in (found["sign"], found["inner_sign"]))
    whole = found["whole"].replace(",", "") or "0"
    digits = minus + whole + (found["decimals"] or "")
    if found["exponent"]:  # 1e-7, as programs write it
        digits = f"{Decimal(digits + found['exponent']):f}"
    return PlainNumber(digits, bool(found["percent"]), bool(found["unit"]))


_TRUTH = {"true": True, "yes": True, "false": False, "no": False}
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?![0-9])")
"""Of a date, which `math-verify` would read as a difference."""


def exact_verdict(answer: str, gold: str) -> bool | None:
    """Whether two plain numbers, truth values or dates are equal. True for equal texts. None if
    `math-verify` has to decide.

    25% equals 25 and 0.25: problems ask for percentages in both ways. Units are ignored.
    """
    said_text, right_text = _bare(answer), _bare(gold)
    if said_text == right_text:
        return True
    if _DAY.match(right_text):
        return False
    if (truth := _TRUTH.get(right_text.lower())) is not None:
        return _TRUTH.get(said_text.lower()) is truth
    pair = _number_pair(answer, gold)
    if pair is None:
        return None
    said, right = (Decimal(number.digits) for number in pair)
    return said == right or (pair[0].percent and said / 100 == right)


def respelled_pair(answer: str, gold: str) -> tuple[str, str]:
    """Both texts in spellings that `math-verify` reads.

    Two numbers become plain digits. LaTeX without delimiters gets a box, for example `2^{10}`.
    """
    pair = _number_pair(answer, gold)
    if pair is not None:
        return pair[0].text, pair[1].text
    has_factorial = _FACTORIAL.search(gold) is not None  # a `!` may also be an exclamation
    answer, gold = (_ORDINAL.sub("", _BARE_EXPONENT.sub(r"^{\1}", one)) for one in (answer, gold))
    is_plain = read_number(gold) is not None
    if is_plain and _WITH_UNIT.match(answer):
        return answer, gold
    gold = _boxed_latex(gold, has_factorial)
    if gold.startswith(r"\boxed") and not _has_delimiter(answer):
        return rf"\boxed{{{answer}}}", gold
    return _boxed_latex(answer, has_factorial), gold


def _number_pair(answer: str, gold: str) -> tuple[PlainNumber, PlainNumber] | None:
    """None also if the gold answer has a unit: `2 ab` is then a product, or the unit matters."""
    right = read_number(gold)
    if right is None or right.unit or right.percent:
        return None
    said = read_number(answer)
    return None if said is None else (said, right)


def _unwrapped(text: str) -> str:
    for start, end in _WRAPPERS:
        if text.startswith(start) and text.endswith(end) and len(text) > len(start + end):
            return _unwrapped(text[len(start) : -len(end)].strip())
    return text


def _bare(text: str) -> str:
    """Without a box, and without a full stop."""
    text = text.strip()
    if len(text) > _LONGEST_CHARS:
        return text
    return _respelled(_unwrapped(text.removesuffix("."))).removesuffix(".")


def _respelled(text: str) -> str:
    for old, new in _RESPELLED:
        text = text.replace(old, new)
    return " ".join(_TEXT.sub(r" \1", text).split())


def _has_delimiter(text: str) -> bool:
    return any(sign in text for sign in ("$", r"\(", r"\[", r"\boxed"))


def _boxed_latex(text: str, has_factorial: bool) -> str:
    prose = re.search(r"(?<![\\{A-Za-z])[A-Za-z]{2,}", text)
    is_latex = _LATEX.search(text) or (has_factorial and "!" in text)
    return text if not is_latex or prose or _has_delimiter(text) else rf"\boxed{{{text}}}"
