"""Saves checkpoints beside training, one at a time, in a thread of each rank that has a part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from grpo_trainer.checkpoint.parts import StatePart
from grpo_trainer.ranks import ALONE, Ranks

Save = Callable[[StatePart, Ranks], Any]
"""Writes a part, with exchanges of the ranks that have one. Its result is that of `finished`."""


class Background:
    """All ranks that have a part call `begin` in the same order. Args: parts: number of them"""

    def __init__(self, ranks: Ranks, parts: int) -> None:
        self._ranks = ranks
        self._exchange = ALONE if parts == 1 else None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Any] | None = None

    def begin(self, tensors: Mapping[str, Tensor], save: Save) -> None:
        """Save a copy of the tensors, in host memory. Waits for the previous save first."""
        self.finished(wait=True)
        if self._exchange is None:
            self._exchange = self._ranks.apart()
        part = StatePart.copied(tensors, leads=self._ranks.leads)
        self._pending = self._thread.submit(save, part, self._exchange)

    def finished(self, *, wait: bool) -> Any:
        """The result of a save once it is there, else None. Raises its errors."""
        if self._pending is None or not (wait or self._pending.done()):
            return None
        found = self._pending.result()
        self._pending = None
        return found

    def close(self) -> None:
        """Wait for the thread."""
        self._thread.shutdown()
