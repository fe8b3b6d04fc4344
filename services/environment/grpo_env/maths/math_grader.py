"""Compares two expressions: exactly if both are plain numbers, otherwise with `math-verify`.

`math-verify` runs in a process of its own: sympy would compute `9^9^9^9` for ever, but a process
can be ended at any time. The own timeouts of the library use signals, which work only in a main
thread, and not during one long multiplication.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from multiprocessing.connection import Connection

from grpo_core.closing import ClosesOnExit
from grpo_core.errors import GrpoError
from grpo_env.maths.numbers import exact_verdict, respelled_pair

GRADING_DEADLINE_S = 2.0
"""CPU time of one comparison. A typical comparison takes a thousandth of this."""

_START_DEADLINE_S = 120.0
_WALL_S_PER_CPU_S = 10.0
"""A comparison may take so much longer than its CPU time, because it may wait for a CPU."""

_MOST_CHARS_SHOWN = 80


class GraderUnusable(GrpoError):
    """The process that grades answers does not start, or grades known answers wrongly."""


class NotGraded(ValueError):
    """The comparison took too long, or crashed its process."""


class MathProcess:
    """One process, which has imported `math-verify`. Only one thread at a time may call it.

    Raises:
        GraderUnusable: it does not start, or finds that 2 does not equal 2.
    """

    def __init__(self) -> None:
        # Not a fork, because this process has threads, and a fork may inherit a held lock.
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs,), name="math", daemon=True)
        self._process.start()
        theirs.close()
        try:
            is_2_equal_to_2 = self._receive(_START_DEADLINE_S)
        except (TimeoutError, ChildProcessError) as error:
            self.end()
            raise GraderUnusable(
                f"the grading process does not start ({error}); install math-verify: "
                "pip install -c requirements/constraints.txt math-verify"
            ) from error
        if not is_2_equal_to_2:
            self.end()
            raise GraderUnusable(
                "math-verify is broken: it finds that 2 does not equal 2; reinstall math-verify"
            )

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def compare(self, answer: str, gold: str, cpu_s: float) -> bool:
        """Whether both are equal.

        Raises:
            TimeoutError: the comparison needs more than `cpu_s` seconds of CPU time.
            ChildProcessError: the process has ended for another reason.
        """
        try:
            self._connection.send((answer, gold, cpu_s))
        except OSError:
            raise ChildProcessError("the process had ended before") from None
        return self._receive(cpu_s * _WALL_S_PER_CPU_S)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _receive(self, deadline_s: float) -> bool:
        if not self._connection.poll(deadline_s):
            raise TimeoutError(f"the process gave no answer for {deadline_s:g} s")
        try:
            return bool(self._connection.recv())
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            if code == -signal.SIGPROF:
                raise TimeoutError("the comparison used up its CPU time") from None
            raise ChildProcessError(f"the process ended with exit code {code}") from None


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
        self._process = MathProcess()
        self._is_closed = False

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

    def accuracy(self, result: str | None, gold: str) -> float:
        """1.0 if the stated result equals the gold answer; 0.0 if it does not, or if there is none.
        Raises as `is_equal`."""
        return float(result is not None and self.is_equal(result, gold))

    def close(self) -> None:
        """Wait for the comparison that is running, then end the process."""
        with self._lock:
            self._is_closed = True
            self._process.end()

    def _verify(self, answer: str, gold: str) -> bool:
        if self._is_closed:
            raise NotGraded("the grader is closed")
        if not self._process.is_alive():
            self._process.end()
            self._process = MathProcess()
        try:
            return self._process.compare(*respelled_pair(answer, gold), self._deadline_s)
        except (TimeoutError, ChildProcessError) as error:
            self._process.end()  # the next comparison starts another one
            reason = f"crashed the grading process: {error}"
            if isinstance(error, TimeoutError):
                reason = f"was not graded within {self._deadline_s:g} s of CPU time"
            shown = answer if len(answer) <= _MOST_CHARS_SHOWN else answer[:_MOST_CHARS_SHOWN] + "…"
            raise NotGraded(f"the answer {shown!r} {reason}") from error


def _serve(connection: Connection) -> None:
    from grpo_env.maths import math_process  # which imports sympy, here in the process alone

    math_process.serve(connection)
