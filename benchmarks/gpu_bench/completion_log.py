"""When requests ended, and how fast tokens came in between."""

from __future__ import annotations

from collections.abc import Sequence


class CompletionLog:
    """Times are those of one clock, in seconds; they come in order."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int]] = []

    def add(self, time_s: float, tokens: int) -> None:
        self._ends.append((time_s, tokens))

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in list(self._ends))

    @property
    def last_s(self) -> float:
        """Needs one request at least."""
        return self._ends[-1][0]

    def rate(self, windows: Sequence[tuple[float, float]]) -> float:
        """Tokens per second in all of the windows together: those of requests that ended there."""
        ends = list(self._ends)
        tokens = sum(n for begin, end in windows for at, n in ends if begin <= at < end)
        return tokens / sum(end - begin for begin, end in windows)
