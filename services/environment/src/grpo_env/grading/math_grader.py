"""Compares two mathematical expressions with `math-verify`, in a separate process.

sympy would compute `9^9^9^9` for ever, but a process can be ended at any time. The library's own
timeouts use signals, which work only in a main thread, and not during one long multiplication.
"""

from __future__ import annotations

import logging
import multiprocessing
import resource

from pebble import ProcessPool

from grpo_core.errors import GrpoError
from grpo_core.process.closing import ClosesOnExit

GRADING_DEADLINE_S = 2.0
"""For one comparison. A typical comparison takes a thousandth of this."""

_START_DEADLINE_S = 120.0
_MEMORY_BYTES = 4 * 2**30
"""Address space of the process. An expression that needs more counts as invalid."""


class GraderUnusable(GrpoError):
    """The process that grades answers does not start, or grades known answers wrongly."""


class NotGraded(ValueError):
    """The comparison took too long, or crashed its process."""


class MathGrader(ClosesOnExit):
    """Compares expressions. Several threads may call it.

    Raises:
        GraderUnusable: the process does not start, or finds that 2 does not equal 2.
    """

    def __init__(self, deadline_s: float = GRADING_DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        # Not a fork, because this process has threads, and a fork may inherit a held lock.
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPool(max_workers=1, initializer=_prepare, context=spawn)
        try:
            works = self._pool.schedule(_equal, ("2", "2")).result(_START_DEADLINE_S)
        except (OSError, TimeoutError, ImportError) as error:
            self.close()
            raise GraderUnusable(
                f"the grading process does not start ({error!r}); install math-verify: "
                "pip install -c constraints.txt math-verify"
            ) from error
        if not works:
            self.close()
            raise GraderUnusable(
                "math-verify is broken: it finds that 2 does not equal 2; reinstall math-verify"
            )

    def is_equal(self, answer: str, gold: str) -> bool:
        """False also if `answer` is not an expression.

        Raises:
            NotGraded: the comparison did not end within the deadline.
        """
        verdict = self._pool.schedule(_equal, (answer, gold), timeout=self._deadline_s)
        try:
            return bool(verdict.result())
        except TimeoutError as error:
            raise NotGraded(
                f"the answer {answer!r} was not graded within {self._deadline_s:g} s"
            ) from error
        except OSError as error:  # pebble's ProcessExpired
            raise NotGraded(
                f"the answer {answer!r} crashed the grading process: {error!r}"
            ) from error

    def close(self) -> None:
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()


def _prepare() -> None:
    """Prepare the process once, so that no comparison has to import."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    # Its warning that timeouts are off does not apply: the pool enforces the deadline.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    import math_verify  # noqa: F401


def _equal(answer: str, gold: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # A boxed expression has priority over the rest of the line.
    extraction = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    parsed, expected = (
        parse(text, extraction, extraction_mode="first_match", parsing_timeout=None)
        for text in (answer, gold)
    )
    return bool(verify(expected, parsed, timeout_seconds=None))
