"""The separate process in which `math-verify` compares two expressions, and its parent's side.

sympy would compute `9^9^9^9` for ever, but a process can be ended at any time. The library's own
timeouts use signals, which work only in a main thread, and not during one long multiplication.
"""

from __future__ import annotations

import logging
import multiprocessing
import resource
import signal
from multiprocessing.connection import Connection

from grpo_env.grading import numeric_equality

_START_DEADLINE_S = 120.0
_WALL_S_PER_CPU_S = 10.0
"""A comparison may take so much longer than its CPU time, because it may wait for a CPU."""

_MEMORY_BYTES = 4 * 2**30
"""Address space of the process. An expression that needs more counts as invalid."""


class MathProcess:
    """One process. Only one thread at a time may call it."""

    def __init__(self) -> None:
        # Not a fork, because this process has threads, and a fork may inherit a held lock.
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs,), name="math", daemon=True)
        self._process.start()
        theirs.close()
        self._verdict_on_2_and_2: bool | None = None

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def works(self) -> bool:
        """Wait until the process has imported `math-verify`. False if it finds that 2 is not 2.

        Raises:
            TimeoutError, ChildProcessError: the process does not start.
        """
        if self._verdict_on_2_and_2 is None:
            self._verdict_on_2_and_2 = self._receive(_START_DEADLINE_S)
        return self._verdict_on_2_and_2

    def compare(self, answer: str, gold: str, cpu_s: float) -> bool:
        """Whether both are equal. Call `works` first.

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


def _serve(connection: Connection) -> None:
    """Compare until the parent closes its end, or ends."""
    # Ctrl-C reaches this process too, but the parent ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    # Its warning that timeouts are off does not apply: the kernel enforces the deadline.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    numeric_equality.make_exact()
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
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # A boxed expression has priority over the rest of the text.
    extraction = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    parsed, expected = (
        parse(text, extraction, extraction_mode="first_match", parsing_timeout=None)
        for text in (answer, gold)
    )
    return bool(verify(expected, parsed, timeout_seconds=None))
