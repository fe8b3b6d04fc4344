"""Draws the training items of one task or of a mixture, without end."""

from __future__ import annotations

import hashlib
import json
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import structlog

from grpo_env.tasks.curriculum import Rule, TaskState, WeightedItems
from grpo_env.tasks.items import Draw, DrawNumbers, Item
from grpo_env.tasks.task import Task

log = structlog.get_logger()


class ItemStream:
    """The training items of one task or of a mixture, without end.

    Every item comes from the task that is furthest behind its share, so the shares are exact at
    any time. Each task goes through all its items in a new order each time; with a rule, the rule
    gives each item of a task its chance, and nothing is the same of two passes. The same items, the
    same seed and the same scores give the same stream.

    Args:
        parts: items and weight of each task
        rule: of the curriculum

    Raises:
        CurriculumUnusable: the rule fails on a small example.
    """

    def __init__(
        self, parts: Sequence[tuple[Sequence[Item], float]], seed: int, rule: Rule | None = None
    ) -> None:
        self._parts: list[_Shuffled | WeightedItems] = [
            _Shuffled(list(items), weight, seed + number)
            if rule is None
            else WeightedItems(items, weight, seed + number, rule)
            for number, (items, weight) in enumerate(parts)
        ]

    def next(self) -> Item:
        """Raises `ValueError` if there are no items."""
        draw = self.draw()
        self.used(draw)
        return draw.item

    def draw(self) -> Draw:
        """The next item, of which `used` or `put_back` says what became of it. Raises `ValueError`
        if there are no items."""
        part = min(
            (part for part in self._parts if part.items and part.weight),
            key=lambda part: (part.given + 1) / part.weight,  # the first one of several
        )
        part.given += 1
        item, number = part.draw()
        return Draw(item, self._parts.index(part), number)

    def used(self, draw: Draw) -> None:
        """The item was sampled: its turn is over."""
        self._parts[draw.part].used.add(draw.number)

    def put_back(self, draw: Draw) -> None:
        """The item was not sampled, so it is given again, but only once: it may be the cause."""
        self._parts[draw.part].put_back(draw.number)

    def positions(self, draw: Draw) -> dict[str, str]:
        """The numbers of the draws that are used with this one, by task, seed and mark of the
        items, as `DrawNumbers`."""
        found = {}
        for at, part in enumerate(self._parts):
            if written := part.used.written(*[draw.number] * (at == draw.part)):
                found[self._order_of(part) + part.mark] = written
        return found

    def go_on(self, positions: Mapping[str, str], step: int) -> None:
        """Go on behind the items that earlier processes used. Reads all items.

        Args:
            positions: as those of the earlier processes
            step: training step now
        """
        for part in self._parts:
            task, data, order = part.task.name, part.task.options.data, self._order_of(part)
            if used := positions.get(order + part.mark):
                part.go_on(DrawNumbers.parse(used))
                log.info("items.continued", task=task, used=part.used.end)
                continue
            if step:
                changed = any(name.startswith(order) for name in positions)
                reason = (
                    f"{data or 'the rows'} or --curriculum changed"
                    if changed
                    else "run-api knows no items of this task and --seed that were used"
                )
                hint = "items that earlier steps trained on may come again"
                log.warning("items.begun_again", task=task, step=step, reason=reason, hint=hint)

    def _order_of(self, part: _Shuffled | WeightedItems) -> str:
        return f"{part.task.name} {part.seed} "

    def __len__(self) -> int:
        """Number of items in one pass."""
        return sum(len(part.items) for part in self._parts)

    def keep(self, fits: Callable[[Item], bool]) -> list[str]:
        """Remove all items for which `fits` returns False, also from the current pass. Returns the
        names of tasks without any item left."""
        for part in self._parts:
            part.keep(fits)
        return [part.task.name for part in self._parts if not part.items]

    def graded(self, item: Item, scores: Sequence[float], step: int) -> None:
        """Note the scores of a group. Args: step: training step in which it was sampled"""
        if part := self._weighted.get(item.task.name):
            part.graded(item, scores, step)

    def lost(self, item: Item) -> None:
        """Note a group that could not be graded."""
        if part := self._weighted.get(item.task.name):
            part.lost(item)

    def pools(self) -> Mapping[str, Mapping[str, int]]:
        """Number of items by task and pool. Empty without a rule, as the two below."""
        return {name: part.pools() for name, part in self._weighted.items()}

    def state(self) -> Mapping[str, TaskState]:
        return {name: part.state() for name, part in self._weighted.items()}

    def restore(self, states: Mapping[str, TaskState]) -> None:
        """Go on from a saved state. Tasks that it lacks begin anew."""
        for name, part in self._weighted.items():
            if name in states:
                part.restore(states[name])

    @property
    def _weighted(self) -> dict[str, WeightedItems]:
        weighted = [part for part in self._parts if isinstance(part, WeightedItems)]
        return {part.task.name: part for part in weighted if part.items}


class _Shuffled:
    """`items` in a new order in each pass; `given`: how many of them were given. The numbers of the
    draws count all items of each pass, also those that `keep` removed."""

    def __init__(self, items: list[Item], weight: float, seed: int) -> None:
        self.items, self.weight, self.given = items, weight, 0
        self.used = DrawNumbers()
        self._all, self._fits = items, [True] * len(items)
        self.seed, self._random = seed, random.Random(seed)
        self._orders: list[list[int] | None] = []  # of each pass; None: all of it is used
        self._again: deque[int] = deque()
        self._failed: set[int] = set()
        self._next = 0

    @property
    def task(self) -> Task:
        return self._all[0].task

    @cached_property
    def mark(self) -> str:
        """16 hexadecimal digits of the SHA-256 of all rows."""
        digest = hashlib.sha256()
        for item in self._all:
            digest.update(json.dumps(item.row, skipkeys=True, default=_content_of).encode())
        return digest.hexdigest()[:16]

    def draw(self) -> tuple[Item, int]:
        while True:
            number = self._again.popleft() if self._again else self._next
            self._next = max(self._next, number + 1)
            place = self._order(number // len(self._all))[-1 - number % len(self._all)]
            if self._fits[place]:
                return self._all[place], number
            self.used.add(number)

    def _order(self, of_pass: int) -> list[int]:
        while len(self._orders) <= of_pass:
            places = range(len(self._all))
            self._orders.append(self._random.sample(places, len(places)))
            ended = min(self.used.low // len(self._all), len(self._orders))
            self._orders[:ended] = [None] * ended
        order = self._orders[of_pass]
        assert order is not None
        return order

    def put_back(self, number: int) -> None:
        if number in self._failed:
            self.used.add(number)
            return
        self._failed.add(number)
        self._again.append(number)

    def go_on(self, used: DrawNumbers) -> None:
        self.used, self._next = used, used.end
        self._again.extend(used.missing())
        self._order(used.end // len(self._all))  # sampled here, not while servers wait

    def keep(self, fits: Callable[[Item], bool]) -> None:
        self._fits = [
            known and fits(item) for known, item in zip(self._fits, self._all, strict=True)
        ]
        self.items = [item for item, known in zip(self._all, self._fits, strict=True) if known]


def _content_of(value: object) -> object:
    # the text of an object, such as an image, may name its address
    return dict(value) if isinstance(value, Mapping) else type(value).__name__
