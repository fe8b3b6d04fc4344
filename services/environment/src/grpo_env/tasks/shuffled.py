"""An endless stream of a data set's items: every epoch in a new order, none twice in an epoch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from grpo_env.tasks import KeptItems

T = TypeVar("T")


class Shuffled(Generic[T]):
    """The same items and the same seed give the same stream."""

    def __init__(self, items: Sequence[T], seed: int) -> None:
        self._items = list(items)
        self._random = random.Random(seed)
        self._left: list[T] = []

    def next(self) -> T:
        """Raises `IndexError` where there is no item at all."""
        if not self._left:
            self._left = self._random.sample(self._items, len(self._items))
        return self._left.pop()

    def keep(self, fits: Callable[[T], bool]) -> KeptItems:
        """Drop what does not fit, from the epoch under way too."""
        before = len(self._items)
        self._items = [item for item in self._items if fits(item)]
        kept = {id(item) for item in self._items}
        self._left = [item for item in self._left if id(item) in kept]
        return KeptItems(kept=len(self._items), skipped=before - len(self._items))
