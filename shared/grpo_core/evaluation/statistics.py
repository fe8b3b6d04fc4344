"""Estimates from the n answers to an item, and 95 % intervals over items.

Names: `pass@k` is the probability that one of k answers is right; `mean@k` is the expected best
reward of k answers, so `mean@1` is the mean reward. Other programs call the mean over k answers
`mean@k`; that number is `mean@1` here, whatever the number of answers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from math import comb, fsum, sqrt
from statistics import NormalDist, quantiles
from typing import NamedTuple

CONFIDENCE = 0.95
RESAMPLES = 2000
"""The simulated ends of an interval vary by about 3 % of its half width."""
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_SLICES = round(2 / (1 - CONFIDENCE))
"""The first and the last of these quantiles are the ends of the interval."""


class Interval(NamedTuple):
    """A 95 % interval. In JSON it is the list `[low, high]`."""

    low: float
    high: float


@lru_cache(maxsize=4096)
def pass_at_k(n: int, right: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k answers is right.

    1 - C(n - right, k) / C(n, k), arXiv 2107.03374. The integers are exact, so the result is
    correct to the last digit for every n.

    Raises:
        ValueError: not 1 <= k <= n.
    """
    _check(n, k)
    draws = comb(n, k)
    return (draws - comb(n - right, k)) / draws


def mean_at_k(rewards: Sequence[float], k: int) -> float:
    """Unbiased estimate of the expected best reward of k answers. For k = 1: the mean reward.

    Sum over i of C(i - 1, k - 1) / C(n, k) * r_(i), with the n rewards r in ascending order: the
    weight of r_(i) is the share of draws of k answers in which it is the best.

    Raises:
        ValueError: not 1 <= k <= n.
    """
    weights = _best_of_k_weights(len(rewards), k)
    return fsum(weight * reward for weight, reward in zip(weights, sorted(rewards), strict=True))


@lru_cache(maxsize=64)
def _best_of_k_weights(n: int, k: int) -> tuple[float, ...]:
    """C(i - 1, k - 1) / C(n, k) for i from 1 to n, from exact integers."""
    _check(n, k)
    draws = comb(n, k)
    return tuple(comb(i, k - 1) / draws for i in range(n))


def _check(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"expected k from 1 to {n}, the number of answers to an item, got {k}")


def wilson(successes: int, n: int) -> Interval:
    """Wilson's score interval of a success rate in n >= 1 independent trials.

    E. B. Wilson, Probable inference, the law of succession, and statistical inference (1927).
    """
    rate, z2_n = successes / n, _Z**2 / n
    centre = rate + z2_n / 2
    half = _Z * sqrt(rate * (1 - rate) / n + z2_n / (4 * n))
    return Interval(max(0.0, (centre - half) / (1 + z2_n)), min(1.0, (centre + half) / (1 + z2_n)))


def mean_interval(values: Sequence[float], seed: int = 0) -> Interval | None:
    """Interval of the mean over items. None if all values are equal and not rates.

    Items are the independent units, because the answers to one item are alike. So an item with
    several answers is one value: the estimate from all its answers. Wilson's interval if every
    value is 0 or 1, as with one answer per item; otherwise a bootstrap over items.

    Args:
        values: one per item, at least one
    """
    if all(value in (0.0, 1.0) for value in values):
        return wilson(round(sum(values)), len(values))
    if min(values) == max(values):
        return None
    return bootstrap(values, seed)


def difference_interval(
    before: Sequence[float], after: Sequence[float], seed: int = 0
) -> Interval | None:
    """Interval of the mean of `after[i] - before[i]`: both evaluations have the same items.

    A bootstrap over items, which needs differences that differ. If all are equal, other items may
    still differ: at most the share that Wilson's interval allows for something never seen. For
    rates, each of those items changes by -1 at least and by 1 at most. For other values: None.
    """
    differences = [new - old for old, new in zip(before, after, strict=True)]
    if min(differences) < max(differences):
        return bootstrap(differences, seed)
    if not all(0.0 <= value <= 1.0 for value in (*before, *after)):
        return None
    share, same = wilson(0, len(differences)).high, differences[0]
    return Interval(same - share * (same + 1), same + share * (1 - same))


def bootstrap(values: Sequence[float], seed: int = 0) -> Interval:
    """Percentile interval of the mean: `RESAMPLES` times as many values, drawn with replacement."""
    draw, n = random.Random(seed).choices, len(values)
    means = [sum(draw(values, k=n)) / n for _ in range(RESAMPLES)]
    ends = quantiles(means, n=_SLICES, method="inclusive")
    return Interval(ends[0], ends[-1])
