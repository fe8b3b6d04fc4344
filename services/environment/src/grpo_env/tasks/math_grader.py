"""Is one mathematical expression equal to another? `math-verify`, in a process of its own.

What a policy writes is parsed with sympy, and `9^9^9^9` computes for ever. The library's own
time-outs are signals, which work in a main thread only and not inside one long multiplication;
a process can be ended at any time.
"""

from __future__ import annotations

import logging
import multiprocessing
import resource

from pebble import ProcessPool

from grpo_core.errors import GrpoError
from grpo_core.process.closing import ClosesOnExit

GRADING_DEADLINE_S = 2.0
"""For one comparison. An ordinary one takes a thousandth of that."""

_START_DEADLINE_S = 120.0
_MEMORY_BYTES = 4 * 2**30
"""Address space of the process; past it an expression counts as one that cannot be parsed."""


class GraderUnusable(GrpoError):
    """The grading process does not start or does not work."""


class NotGraded(ValueError):
    """No verdict: the comparison took too long, or ended its process."""


class MathGrader(ClosesOnExit):
    """Compares expressions; safe to call from several threads.

    Raises:
        GraderUnusable: it cannot tell that 2 is 2.
    """

    def __init__(self, deadline_s: float = GRADING_DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        # Not forked: this process has threads, and a fork of them may hold a lock for ever.
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPool(max_workers=1, initializer=_prepare, context=spawn)
        try:
            works = self._pool.schedule(_equal, ("2", "2")).result(_START_DEADLINE_S)
        except (OSError, TimeoutError, ImportError) as error:
            self.close()
            raise GraderUnusable(
                f"the grading process does not start: {error!r}; is math-verify installed? "
                "pip install -c constraints.txt math-verify"
            ) from error
        if not works:
            self.close()
            raise GraderUnusable("math-verify finds that 2 is not 2; reinstall it")

    def is_equal(self, answer: str, gold: str) -> bool:
        """False also where `answer` is no expression at all.

        Raises:
            NotGraded: no verdict within the deadline.
        """
        verdict = self._pool.schedule(_equal, (answer, gold), timeout=self._deadline_s)
        try:
            return bool(verdict.result())
        except TimeoutError as error:
            raise NotGraded(f"{answer!r}: no verdict within {self._deadline_s:g} s") from error
        except OSError as error:  # pebble's ProcessExpired
            raise NotGraded(f"{answer!r} ended the grading process: {error!r}") from error

    def close(self) -> None:
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()


def _prepare() -> None:
    """Once per process, so that no comparison pays for the imports."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    # It warns that its time-outs are off: ours is outside.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    import math_verify  # noqa: F401


def _equal(answer: str, gold: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # What is boxed is the answer, whatever else the line says.
    extraction = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    parsed, expected = (
        parse(text, extraction, extraction_mode="first_match", parsing_timeout=None)
        for text in (answer, gold)
    )
    return bool(verify(expected, parsed, timeout_seconds=None))
