"""How the time of a run is shared out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.gpu_bench.settings import PART_WEIGHTS, PartName


@dataclass(frozen=True)
class Deadline:
    """`at`: by `clock`."""

    at: float
    clock: Callable[[], float] = time.monotonic

    @property
    def left_s(self) -> float:
        return self.at - self.clock()

    @property
    def passed(self) -> bool:
        return self.left_s <= 0

    def part_of(self, share: float) -> Deadline:
        """After `share` of what is left."""
        return Deadline(self.clock() + share * max(0.0, self.left_s), self.clock)


class Budget:
    """Args: seconds: from now on"""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.end = Deadline(clock() + seconds, clock)

    def deadline(self, parts_to_come: Sequence[PartName]) -> Deadline:
        """Of the first of the parts: what one before it has not used is shared by all."""
        weights = [PART_WEIGHTS[part] for part in parts_to_come]
        return self.end.part_of(weights[0] / sum(weights))
