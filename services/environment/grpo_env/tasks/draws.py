"""Numbers of the draws from a task's items, as run-api keeps them for an environment."""

from __future__ import annotations

from collections.abc import Iterable


class DrawNumbers:
    """A set of numbers from 0 on. `low`: the lowest that is missing.

    Written as its ranges: `0-41,43-45`.
    """

    def __init__(self, low: int = 0, above: Iterable[int] = ()) -> None:
        self.low = low
        self._above: set[int] = set()
        for number in above:
            self.add(number)

    @classmethod
    def parse(cls, written: str) -> DrawNumbers:
        """Args: written: the ranges in ascending order

        Raises:
            ValueError: the text is no list of ranges.
        """
        found = cls()
        for first, last in (map(int, part.split("-")) for part in written.split(",")):
            if first <= found.low:
                found.low = max(found.low, last + 1)
            else:
                found._above.update(range(first, last + 1))
        return found

    @property
    def end(self) -> int:
        """One more than the largest number."""
        return max(self._above, default=self.low - 1) + 1

    def add(self, number: int) -> None:
        if number >= self.low:
            self._above.add(number)
        while self.low in self._above:
            self._above.remove(self.low)
            self.low += 1

    def missing(self) -> list[int]:
        """All numbers below `end` that are not in the set."""
        return [n for n in range(self.low, self.end) if n not in self._above]

    def written(self) -> str:
        """Empty if the set is."""
        ranges = [[0, self.low - 1]] if self.low else []
        for number in sorted(self._above):
            if ranges and ranges[-1][1] == number - 1:
                ranges[-1][1] = number
            else:
                ranges.append([number, number])
        return ",".join(f"{first}-{last}" for first, last in ranges)

    def with_number(self, number: int) -> DrawNumbers:
        return DrawNumbers(self.low, [*self._above, number])
