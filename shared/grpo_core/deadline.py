"""A deadline that a loop can check and suspend."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Deadline:
    """A point in time, `seconds` after its creation.

    Args:
        clock: returns seconds; tests pass a fake one.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._at = clock() + seconds

    @property
    def left_s(self) -> float:
        """0 once the deadline has passed."""
        return max(0.0, self._at - self._clock())

    @property
    def has_passed(self) -> bool:
        return self._clock() >= self._at

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Postpone the deadline by the time that the block takes."""
        began = self._clock()
        try:
            yield
        finally:
            self._at += self._clock() - began
