"""The items of a task, drawn by the rule of a curriculum, and the measurements behind it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel, ConfigDict

from grpo_env.tasks.curriculum import (
    HALF_LIFE_STEPS,
    POOLS,
    ItemFacts,
    Rule,
    checked_weights,
    require_usable,
)
from grpo_env.tasks.draws import DrawNumbers

if TYPE_CHECKING:
    from grpo_env.tasks.items import Item

REFRESH_EVERY_GROUPS = 16
"""The rule is called again after this number of groups that were graded or lost."""


class Sums(NamedTuple):
    """Of an item's scores, each multiplied with what it counts at `step`."""

    completions: float
    total: float
    squares: float
    step: int

    def with_scores(self, scores: Sequence[float], step: int) -> Sums:
        newest = max(step, self.step)
        earlier, new = (0.5 ** ((newest - of) / HALF_LIFE_STEPS) for of in (self.step, step))
        return Sums(
            earlier * self.completions + new * len(scores),
            earlier * self.total + new * sum(scores),
            earlier * self.squares + new * sum(score**2 for score in scores),
            newest,
        )


class TaskState(BaseModel):
    """What a curriculum keeps of one task. `items`: sums by the key of the item; those that are
    not seen are left out. `low`, `high`: scores of the task so far; None if there are none."""

    model_config = ConfigDict(extra="forbid")

    draws: int = 0
    low: float | None = None
    high: float | None = None
    items: dict[str, Sums] = {}


class WeightedItems:
    """The items of one task, drawn by the weights of a rule. Each draw has a random generator of
    its own, made of the seed and the number of the draw: so the same state gives the same draws.

    Args:
        weight: share of the task in a mixture

    `given`: number of items since the start, from which the mixture balances its tasks.

    Raises:
        CurriculumUnusable: the rule fails on a small example.
    """

    def __init__(self, items: Sequence[Item], weight: float, seed: int, rule: Rule) -> None:
        require_usable(rule, items)
        self.items, self.weight, self.given = [*items], weight, 0
        self.task, self.seed = items[0].task, seed
        self._rule = rule
        self._facts = {item.key: ItemFacts(item.row, item.task.name) for item in items}
        self._state = TaskState()
        self._step = 0
        self._cumulative: list[float] = []
        self._finished = 0  # groups since the rule was called
        self._draws = 0  # with those before the state was saved

    mark = "curriculum"

    @property
    def used(self) -> DrawNumbers:
        """All draws: nothing comes in turn that could be missing."""
        return DrawNumbers(self._draws)

    def draw(self) -> tuple[Item, int]:
        """Raises `CurriculumUnusable` if the rule fails."""
        if not self._cumulative or self._finished >= REFRESH_EVERY_GROUPS:
            facts = [self._facts[item.key] for item in self.items]
            self._cumulative = [*accumulate(checked_weights(self._rule, facts, self._step))]
            self._finished = 0
        self._draws += 1
        draw = random.Random(f"{self.seed} {self._draws}")
        return draw.choices(self.items, cum_weights=self._cumulative)[0], self._draws - 1

    def put_back(self, number: int) -> None:
        """Nothing: an item that was not sampled has its chance in each draw."""

    def go_on(self, used: DrawNumbers) -> None:
        """Go on behind the draws of an earlier process, also if the saved state has fewer."""
        self._draws = max(self._draws, used.end)

    def keep(self, fits: Callable[[Item], bool]) -> None:
        self.items = [item for item in self.items if fits(item)]
        self._cumulative = []

    def graded(self, item: Item, scores: Sequence[float], step: int) -> None:
        """Note the scores of a group. Args: step: training step in which it was sampled"""
        state, self._step = self._state, step
        earlier = state.items.get(item.key, Sums(0.0, 0.0, 0.0, step))
        state.items[item.key] = earlier.with_scores(scores, step)
        known = [value for value in (state.low, state.high) if value is not None]
        ends = min([*known, *scores]), max([*known, *scores])
        is_wider = ends != (state.low, state.high)
        state.low, state.high = ends
        self._describe(state.items if is_wider else [item.key])
        self._finished += 1

    def lost(self, item: Item) -> None:
        """Note a group that could not be graded."""
        self._facts[item.key].lost += 1
        self._finished += 1

    def _describe(self, keys: Iterable[str]) -> None:
        low, high = self._state.low or 0.0, self._state.high or 0.0
        if low == high:
            low, high = min(0.0, low), max(1.0, high)
        for key in keys:
            sums, facts = self._state.items[key], self._facts[key]
            mean = sums.total / sums.completions
            variance = max(0.0, sums.squares / sums.completions - mean**2)
            facts.solve_rate = (mean - low) / (high - low)
            facts.variance = variance / (high - low) ** 2
            facts.completions, facts.step = sums.completions, sums.step

    def pools(self) -> Mapping[str, int]:
        """Number of items in each pool."""
        counts = Counter(self._facts[item.key].pool for item in self.items)
        return {pool: counts[pool] for pool in POOLS}

    def state(self) -> TaskState:
        return self._state.model_copy(update={"draws": self._draws})

    def restore(self, state: TaskState) -> None:
        """Go on from a saved state. Items that the task no longer has are forgotten."""
        known = {key: sums for key, sums in state.items.items() if key in self._facts}
        self._state = state.model_copy(update={"items": known})
        self._draws = state.draws
        self._step = max((sums.step for sums in known.values()), default=0)
        self._describe(known)
        self._cumulative = []
