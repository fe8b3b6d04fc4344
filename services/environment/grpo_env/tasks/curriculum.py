"""A curriculum: how often each item of a task is drawn, by the scores of its groups."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from grpo_core.errors import GrpoError
from grpo_env.tasks.items import DrawNumbers, Item
from grpo_env.tasks.rows import Row

HALF_LIFE_STEPS = 20.0
"""After this number of training steps a score counts half, since the policy has changed."""
PRIOR_COMPLETIONS = 0.1
"""`learnable` adds half of this number of solved completions, and half of it of unsolved ones."""
EXPLORATION = 0.5
"""Largest share of the draws that `learnable` gives to unseen items."""

UNSEEN, HARD, MEDIUM, EASY = "unseen", "hard", "medium", "easy"
POOLS = (UNSEEN, HARD, MEDIUM, EASY)
HARD_UP_TO, EASY_FROM = 0.1, 0.9
"""Solve rates of the pools: a group of eight with one right or one wrong answer is medium."""


class CurriculumUnusable(GrpoError):
    """A rule fails or returns no usable weights, or the saved state cannot be read or written."""


@dataclass(slots=True)
class ItemFacts:
    """What is known of one item.

    Scores are on the scale on which the lowest score that the task has given in this run is 0 and
    the highest is 1; until it has given two different ones, the scale is 0 to 1 as it is. Earlier
    scores count less: half, if they are `HALF_LIFE_STEPS` older than the newest.

    Args:
        task: name of the task
        solve_rate: mean of the item's scores; None if none of its groups was graded yet
        variance: of the item's scores; p(1 - p) for a solve rate p of scores 0 and 1
        completions: how many scores these are, earlier ones counted less
        step: training step in which the newest group was sampled
        lost: number of groups that could not be graded
    """

    row: Row
    task: str
    solve_rate: float | None = None
    variance: float = 0.0
    completions: float = 0.0
    step: int = 0
    lost: int = 0

    def age(self, step: int) -> int:
        """Training steps since the newest group; a run that was resumed may have gone back."""
        return max(0, step - self.step)

    @property
    def pool(self) -> str:
        if self.solve_rate is None:
            return UNSEEN
        if self.solve_rate <= HARD_UP_TO:
            return HARD
        return EASY if self.solve_rate >= EASY_FROM else MEDIUM


Rule = Callable[[Sequence[ItemFacts], int], Sequence[float]]
"""Gives each item of a task its weight, 0 or more, at a training step. An item is drawn with the
probability weight / sum of the weights."""


def learnable(items: Sequence[ItemFacts], step: int) -> list[float]:
    """Weights that are highest for items that the policy solves sometimes; their sum is 1.

    An item's weight is its learnability, the variance of its scores: p(1 - p) for scores 0 and 1
    (Sampling For Learnability, arXiv 2408.15099). The improvement that a policy gradient expects of
    a prompt grows with this variance (LILO, arXiv 2502.12272). With group_size scores that are all
    equal it is 0, and the group has no advantages.

    The variance includes `PRIOR_COMPLETIONS` scores, half of them 0 and half of them 1, so that it
    is never 0. With the age of an item its own scores count less, as Prioritized Level Replay
    (arXiv 2010.03934) replays what was not seen for long: the variance rises towards 0.25, and the
    item comes back. Unseen items share `EXPLORATION` of the draws, but none has more weight than
    the best of the others, and after n lost groups it has 1 / (n + 1)^2 of its weight.
    """
    found = [None if item.solve_rate is None else _learnability(item, step) for item in items]
    known = [value for value in found if value is not None]
    each = 1.0
    if known:
        shared = sum(known) * EXPLORATION / (1 - EXPLORATION)
        each = min(max(known), shared / max(1, len(items) - len(known)))
    weights = [
        each / (item.lost + 1) ** 2 if value is None else value
        for item, value in zip(items, found, strict=True)
    ]
    total = sum(weights)
    return [weight / total for weight in weights]


def _learnability(item: ItemFacts, step: int) -> float:
    assert item.solve_rate is not None
    known: float = item.completions * 0.5 ** (item.age(step) / HALF_LIFE_STEPS)
    of_all = known + PRIOR_COMPLETIONS
    mean = (known * item.solve_rate + PRIOR_COMPLETIONS / 2) / of_all
    squares = known * (item.variance + item.solve_rate**2) + PRIOR_COMPLETIONS / 2
    return squares / of_all - mean**2


def checked_weights(rule: Rule, items: Sequence[ItemFacts], step: int) -> list[float]:
    """The rule's weights. Raises `CurriculumUnusable`, which says what is wrong with them."""
    name = f"--curriculum: {getattr(rule, '__name__', rule)}(items, step)"
    try:
        weights = [float(weight) for weight in rule(items, step)]
    except Exception as error:  # the code of a user
        raise CurriculumUnusable(f"{name} raised {type(error).__name__}: {error}") from error
    if len(weights) != len(items):
        raise CurriculumUnusable(f"{name} returned {len(weights)} weights for {len(items)} items")
    for at, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise CurriculumUnusable(
                f"{name} returned {weight:g} for item {at}; expected a finite number of at least 0"
            )
    if not sum(weights) > 0:
        raise CurriculumUnusable(f"{name} returned only weights of 0; at least one must be above")
    return weights


_EXAMPLES: Sequence[tuple[float, int]] = ((0.0, 0), (0.5, 40), (1.0, 50))
"""Solve rate, and step of the newest group."""
_EXAMPLE_STEP, _EXAMPLE_COMPLETIONS = 50, 8.0


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
        # On at most four: one that is unseen, and others as if their groups had been graded.
        examples = [ItemFacts(item.row, item.task.name) for item in items[: len(_EXAMPLES) + 1]]
        for one, (rate, step) in zip(examples[1:], _EXAMPLES, strict=False):
            one.solve_rate, one.variance = rate, rate * (1 - rate)
            one.completions, one.step = _EXAMPLE_COMPLETIONS, step
        checked_weights(rule, examples, _EXAMPLE_STEP)
        self.items, self.weight, self.given = [*items], weight, 0
        self.task, self.seed = items[0].task, seed
        self._rule = rule
        self._facts = {item.key: ItemFacts(item.row, item.task.name) for item in items}
        self._state = TaskState()
        self._step = 0
        self._cumulative: list[float] = []
        self._finished = 0  # groups since the rule was called

    mark = "curriculum"

    @property
    def used(self) -> DrawNumbers:
        """All draws: nothing comes in turn that could be missing."""
        return DrawNumbers(self._state.draws)

    def draw(self) -> tuple[Item, int]:
        """Raises `CurriculumUnusable` if the rule fails."""
        if not self._cumulative or self._finished >= REFRESH_EVERY_GROUPS:
            facts = [self._facts[item.key] for item in self.items]
            self._cumulative = [*accumulate(checked_weights(self._rule, facts, self._step))]
            self._finished = 0
        self._state.draws += 1
        draw = random.Random(f"{self.seed} {self._state.draws}")
        return draw.choices(self.items, cum_weights=self._cumulative)[0], self._state.draws - 1

    def put_back(self, number: int) -> None:
        """Nothing: an item that was not sampled has its chance in each draw."""

    def go_on(self, used: DrawNumbers) -> None:
        """Go on behind the draws of an earlier process, also if the saved state has fewer."""
        self._state.draws = max(self._state.draws, used.end)

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
        return self._state.model_copy()

    def restore(self, state: TaskState) -> None:
        """Go on from a saved state. Items that the task no longer has are forgotten."""
        known = {key: sums for key, sums in state.items.items() if key in self._facts}
        self._state = state.model_copy(update={"items": known})
        self._step = max((sums.step for sums in known.values()), default=0)
        self._describe(known)
        self._cumulative = []
