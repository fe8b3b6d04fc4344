"""Compares two expressions: exactly if both are plain numbers, otherwise with `math-verify`."""

from __future__ import annotations

import threading

from grpo_core.errors import GrpoError
from grpo_core.process.closing import ClosesOnExit
from grpo_env.grading.math_process import MathProcess
from grpo_env.grading.numbers import exact_verdict, respelled_pair

GRADING_DEADLINE_S = 2.0
"""CPU time of one comparison. A typical comparison takes a thousandth of this."""

_MOST_CHARS_SHOWN = 80


class GraderUnusable(GrpoError):
    """The process that grades answers does not start, or grades known answers wrongly."""


class NotGraded(ValueError):
    """The comparison took too long, or crashed its process."""


class MathGrader(ClosesOnExit):
    """Compares expressions. Several threads may call it.

    Args:
        deadline_s: CPU time of one comparison, in seconds.

    Raises:
        GraderUnusable: the process does not start, or finds that 2 does not equal 2.
    """

    def __init__(self, deadline_s: float = GRADING_DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._process: MathProcess | None = MathProcess()
        try:
            _check(self._process)
        except GraderUnusable:
            self.close()
            raise

    def is_equal(self, answer: str, gold: str) -> bool:
        """False also if `answer` is not an expression.

        Raises:
            NotGraded: the comparison did not end within the deadline, or the grader is closed.
            GraderUnusable: the process ended and does not start again.
        """
        verdict = exact_verdict(answer, gold)
        if verdict is not None:
            return verdict
        with self._lock:
            # Plain strings: subclasses of str would take all their fields to the process.
            return self._verify(str(answer), str(gold))

    def close(self) -> None:
        """Wait for the comparison that is running, then end the process."""
        with self._lock:
            if self._process is not None:
                self._process.end()
                self._process = None

    def _verify(self, answer: str, gold: str) -> bool:
        if self._process is None:
            raise NotGraded("the grader is closed")
        if not self._process.is_alive():
            self._process = _restarted(self._process)
        _check(self._process)
        try:
            return self._process.compare(*respelled_pair(answer, gold), self._deadline_s)
        except TimeoutError as error:
            reason = f"was not graded within {self._deadline_s:g} s of CPU time"
            failure: OSError = error
        except ChildProcessError as error:
            reason = f"crashed the grading process: {error}"
            failure = error
        self._process = _restarted(self._process)
        raise NotGraded(f"the answer {_shortened(answer)!r} {reason}") from failure


def _restarted(process: MathProcess) -> MathProcess:
    """Does not wait until the new process works: the next comparison does."""
    process.end()
    return MathProcess()


def _check(process: MathProcess) -> None:
    try:
        works = process.works()
    except (TimeoutError, ChildProcessError) as error:
        raise GraderUnusable(
            f"the grading process does not start ({error}); install math-verify: "
            "pip install -c constraints.txt math-verify"
        ) from error
    if not works:
        raise GraderUnusable(
            "math-verify is broken: it finds that 2 does not equal 2; reinstall math-verify"
        )


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_CHARS_SHOWN else text[:_MOST_CHARS_SHOWN] + "…"
