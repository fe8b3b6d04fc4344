"""One way to bound a wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Deadline:
    """Passes `seconds` after it was made.

    Args:
        clock: in seconds; tests bring their own.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._at = clock() + seconds

    @property
    def left_s(self) -> float:
        """0 once it has passed."""
        return max(0.0, self._at - self._clock())

    @property
    def has_passed(self) -> bool:
        return self._clock() >= self._at

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The time that the block takes does not count."""
        began = self._clock()
        try:
            yield
        finally:
            self._at += self._clock() - began
