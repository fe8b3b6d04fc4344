"""Rules of a curriculum: how often each item of a task is drawn, by the scores of its groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpo_core.errors import GrpoError
from grpo_env.tasks.task import Row

if TYPE_CHECKING:
    from grpo_env.tasks.items import Item

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
                f"{name} returned the weight {weight:g} for item {at}; expected a finite number of "
                "at least 0"
            )
    if not sum(weights) > 0:
        raise CurriculumUnusable(f"{name} returned only weights of 0; at least one must be above")
    return weights


_EXAMPLES: Sequence[tuple[float, int]] = ((0.0, 0), (0.5, 40), (1.0, 50))
"""Solve rate, and step of the newest group."""
_EXAMPLE_STEP, _EXAMPLE_COMPLETIONS = 50, 8.0


def require_usable(rule: Rule, items: Sequence[Item]) -> None:
    """Try a rule on at most four items: one that is unseen, and others as if their groups had been
    graded. Raises `CurriculumUnusable`."""
    facts = [ItemFacts(item.row, item.task.name) for item in items[: len(_EXAMPLES) + 1]]
    for one, (rate, step) in zip(facts[1:], _EXAMPLES, strict=False):
        one.solve_rate, one.variance = rate, rate * (1 - rate)
        one.completions, one.step = _EXAMPLE_COMPLETIONS, step
    checked_weights(rule, facts, _EXAMPLE_STEP)
