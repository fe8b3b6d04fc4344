"""What runs in the process that compares expressions with `math-verify`.

`math-verify` 0.9 rounds to an absolute number of decimals, so it finds 6.63e-34 equal to 1.6e-19,
and 0.5 equal to 0.5000001. Here two numbers are compared exactly, not in six decimals.
"""

from __future__ import annotations

import logging
import resource
import signal
from decimal import ROUND_DOWN, ROUND_HALF_EVEN, Context, Decimal
from multiprocessing.connection import Connection
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, grader, parse, verify

_MEMORY_BYTES = 4 * 2**30
"""Address space of the process. An expression that needs more counts as invalid."""

_LEAST_DIGITS = 6
"""A decimal with so many significant digits may be the rounded value of a number that has no end,
such as 0.333333 for 1/3. `math-verify` allows that too."""
_EXACT_DIGITS = 60
_DIGITS_OF_FLOATS = 15
_TOLERANCE, _TOLERANCE_OF_FLOATS = 1e-30, 1e-12
"""Relative, for expressions such as roots. sympy keeps 15 digits of decimals inside them."""

_rounded = grader.sympy_numeric_eq


def serve(connection: Connection) -> None:
    """Compare until the parent closes its end, or ends."""
    # Ctrl-C reaches this process too, but the parent ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    # Its warning that timeouts are off does not apply: the kernel enforces the deadline.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    grader.sympy_numeric_eq = _equal_numbers
    connection.send(_equal("2", "2"))
    while True:
        try:
            answer, gold, cpu_s = connection.recv()
        except EOFError:
            return
        # At the deadline the kernel ends the process, even during one long multiplication.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        verdict = _equal(answer, gold)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(verdict)


def _equal(answer: str, gold: str) -> bool:
    # A boxed expression has priority over the rest of the text.
    extraction = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    parsed, expected = (
        parse(text, extraction, extraction_mode="first_match", parsing_timeout=None)
        for text in (answer, gold)
    )
    return bool(verify(expected, parsed, timeout_seconds=None))


def _equal_numbers(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
    if not _rounded(a, b, float_rounding, numeric_precision):
        return False
    if hasattr(a, "shape") or hasattr(b, "shape"):
        return True  # its elements have been compared, by this function
    are_whole = (grader.is_atomic_or_pct_atomic(one, grader.Integer) for one in (a, b))
    return all(are_whole) or is_equal(*map(grader.safe_sympy_doit, (a, b)))


def is_equal(a: Any, b: Any) -> bool:
    """Whether two expressions of sympy have one value; True for those that are no numbers."""
    if not (a.is_number and b.is_number) or a == b:
        return True
    if a.is_Rational and b.is_Rational:
        return False
    if a.is_Float and b.is_Float:
        shorter, longer = sorted((_written(a), _written(b)), key=_digits)
        is_computed = _digits(longer) >= _DIGITS_OF_FLOATS - 1
        return shorter == longer or (is_computed and _is_rounded(longer, shorter))
    if a.is_Float:
        return _rounds_to(b, _written(a))
    if b.is_Float:
        return _rounds_to(a, _written(b))
    tolerance = _TOLERANCE_OF_FLOATS if a.has(grader.Float) or b.has(grader.Float) else _TOLERANCE
    first, second = (one.evalf(_EXACT_DIGITS) for one in (a, b))
    return bool(abs(first - second) <= tolerance * max(abs(first), abs(second)))


def _written(number: Any) -> Decimal:
    return Decimal(str(number)).normalize()


def _rounds_to(number: Any, decimal: Decimal) -> bool:
    """Whether `decimal` is the number, or the number in the digits of `decimal`."""
    if not number.is_real:
        return False
    return _is_rounded(Decimal(str(number.evalf(_EXACT_DIGITS))), decimal)


def _is_rounded(exact: Decimal, decimal: Decimal) -> bool:
    """Whether both are equal in the digits of `decimal`, rounded or cut off."""
    digits = _digits(decimal)
    if digits < _LEAST_DIGITS:
        return Context(prec=_EXACT_DIGITS // 2).create_decimal(exact) == decimal
    if digits > _DIGITS_OF_FLOATS:  # as Python prints 2/3
        return abs(exact - decimal) <= abs(exact) * Decimal(10) ** (1 - _DIGITS_OF_FLOATS)
    ways = (Context(prec=digits, rounding=way) for way in (ROUND_HALF_EVEN, ROUND_DOWN))
    return any(context.create_decimal(exact) == decimal for context in ways)


def _digits(decimal: Decimal) -> int:
    return len(decimal.as_tuple().digits)
