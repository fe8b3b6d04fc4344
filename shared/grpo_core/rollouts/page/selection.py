"""Chooses the steps that a page of bounded size can hold."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from grpo_core.rollouts.page.encode import GroupEncoder, Json
from grpo_core.rollouts.record import RolloutRecord

T = TypeVar("T")
Group = Sequence[RolloutRecord]

LARGEST_SHARE = 8
"""One step takes at most this share of the page: 1 / LARGEST_SHARE."""


@dataclass(frozen=True)
class EncodedStep:
    """A step in the page. `groups`: see `GroupEncoder.summary`; `all_groups`: their number in the
    step; `data`: the details, packed."""

    step: int
    groups: list[Json]
    all_groups: int
    data: str


class StepSelection:
    """Encodes steps one after the other. If they exceed the limit, every second one is dropped,
    then every second of the remaining ones, and so on. The first and the last step always stay.

    Memory: the limit and one step.

    Args:
        limit: characters of all steps together; the last step and a step that consists of one
            large group may exceed it
    """

    def __init__(self, encoder: GroupEncoder, limit: int) -> None:
        self._encoder = encoder
        self._limit = limit
        self._stride = 1
        self._kept: list[EncodedStep] = []
        self._last: tuple[int, Sequence[Group]] | None = None
        self.seen = 0
        """Number of all steps."""

    def add(self, step: int, groups: Sequence[Group]) -> None:
        """Raises:
        BrokenRollouts: the lists of a sequence do not have the same length."""
        if self.seen % self._stride == 0:
            self._keep(self._encoded(step, groups))
            self._last = None
        else:
            self._last = step, groups
        self.seen += 1

    def finish(self) -> list[EncodedStep]:
        """The kept steps, in order."""
        if self._last is not None:
            self._kept.append(self._encoded(*self._last))
        return self._kept

    def _keep(self, step: EncodedStep) -> None:
        self._kept.append(step)
        while len(self._kept) > 2 and sum(len(one.data) for one in self._kept) > self._limit:
            self._stride *= 2
            self._kept = self._kept[::2]

    def _encoded(self, step: int, groups: Sequence[Group]) -> EncodedStep:
        """All groups of a step, or evenly chosen ones if it is too large."""
        largest, shown = self._limit // LARGEST_SHARE, groups
        while True:
            data = packed({"groups": [self._encoder.details(group) for group in shown]})
            if len(data) <= largest or len(shown) == 1:
                break
            shown = evenly(groups, max(1, len(shown) * largest // (len(data) + 1)))
        summaries = [self._encoder.summary(group) for group in shown]
        return EncodedStep(step, summaries, len(groups), data)


def evenly(items: Sequence[T], count: int) -> list[T]:
    """`count` of the items at equal distances, the first one included."""
    return [items[at * len(items) // count] for at in range(count)]


def packed(content: Json) -> str:
    """Compressed JSON in base64. Neither the page's HTML nor its scripts can be ended by it."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
