"""Numbers worked by hand, and the coverage of the intervals on simulated data."""

from __future__ import annotations

import math
import random
from itertools import combinations
from statistics import fmean

import pytest

from grpo_core.evaluation import statistics
from grpo_core.evaluation.statistics import (
    Interval,
    bootstrap,
    difference_interval,
    mean_at_k,
    mean_interval,
    pass_at_k,
    wilson,
)


def test_both_estimates_are_means_over_all_draws_of_k_answers() -> None:
    source = random.Random(0)
    for n in range(1, 8):
        rewards = [source.choice((-0.5, 0.0, 0.25, 1.0)) for _ in range(n)]
        for k in range(1, n + 1):
            draws = list(combinations(rewards, k))
            best = fmean(max(draw) for draw in draws)
            some_right = fmean(max(draw) == 1.0 for draw in draws)
            assert mean_at_k(rewards, k) == pytest.approx(best, rel=1e-12)
            assert pass_at_k(n, rewards.count(1.0), k) == pytest.approx(some_right, rel=1e-12)


def test_estimates_stay_exact_with_two_thousand_answers() -> None:
    n = 2000  # C(2000, 1000) is about 2e600, beyond float64
    assert pass_at_k(n, 1, n // 2) == 0.5
    assert pass_at_k(n, 1, 1) == 5e-4
    # 1 - C(1000, 2)/C(2000, 2) = 1 - 1000 * 999 / (2000 * 1999)
    assert pass_at_k(n, 1000, 2) == pytest.approx(1 - 999 / 3998, rel=1e-15)
    for k in (1, 2, 64, n // 2, n):
        assert mean_at_k([1.0] * n, k) == pytest.approx(1.0, rel=1e-11)  # the weights sum to 1
        one_right = [1.0] + [0.0] * (n - 1)
        assert mean_at_k(one_right, k) == pytest.approx(pass_at_k(n, 1, k), rel=1e-11)


@pytest.mark.parametrize("k", [0, 5, -1])
def test_no_k_above_the_number_of_answers(k: int) -> None:
    for estimate in (lambda: pass_at_k(4, 1, k), lambda: mean_at_k((0.0,) * 4, k)):
        with pytest.raises(ValueError, match=rf"k from 1 to 4.*got {k}"):
            estimate()


def test_wilson_by_hand() -> None:
    z2 = 1.959963984540054**2
    assert wilson(0, 10) == pytest.approx((0.0, z2 / (10 + z2)))
    assert wilson(10, 10) == pytest.approx((10 / (10 + z2), 1.0))
    # Centre (8 + z2/2)/(10 + z2); half z sqrt(8 * 2/10 + z2/4)/(10 + z2)
    half = math.sqrt(z2 * (1.6 + z2 / 4)) / (10 + z2)
    centre = (8 + z2 / 2) / (10 + z2)
    assert wilson(8, 10) == pytest.approx((centre - half, centre + half))


def test_the_interval_of_rates_is_wilsons_and_that_of_several_answers_a_bootstrap() -> None:
    assert mean_interval([1.0, 0.0, 1.0, 1.0]) == wilson(3, 4)
    assert mean_interval([1.0] * 20) == wilson(20, 20)  # a bootstrap would claim certainty
    assert mean_interval([0.3] * 20) is None
    assert mean_interval([0.25, 0.0, 1.0] * 10, seed=1) == bootstrap([0.25, 0.0, 1.0] * 10, 1)


def test_a_bootstrap_repeats_with_its_seed_and_matches_the_normal_interval() -> None:
    source = random.Random(3)
    values = [source.random() for _ in range(400)]
    interval = bootstrap(values, seed=5)
    assert interval == bootstrap(values, seed=5)
    assert interval != bootstrap(values, seed=6)
    mean = fmean(values)
    half = 1.96 * math.sqrt(fmean((value - mean) ** 2 for value in values) / len(values))
    assert interval == pytest.approx((mean - half, mean + half), abs=0.1 * half)


def test_pairing_narrows_the_interval_of_a_difference() -> None:
    source = random.Random(4)
    before = [source.random() for _ in range(200)]
    after = [value + source.gauss(0.1, 0.02) for value in before]
    paired = difference_interval(before, after)
    assert paired is not None
    assert paired == pytest.approx((0.097, 0.103), abs=0.003)
    assert _width(paired) < 0.2 * _width(bootstrap(after))


def test_equal_differences_of_rates_are_no_certainty() -> None:
    unseen = wilson(0, 50).high
    same = difference_interval([0.5] * 50, [0.5] * 50)
    all_better = difference_interval([0.0] * 50, [1.0] * 50)
    assert same == pytest.approx((-unseen, unseen))
    assert all_better == pytest.approx((1 - 2 * unseen, 1.0))
    assert difference_interval([-3.0] * 50, [2.0] * 50) is None  # rewards have no known bounds


def _width(interval: Interval) -> float:
    return interval.high - interval.low


@pytest.mark.full
def test_intervals_cover_the_truth_in_95_percent_of_simulated_evaluations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """400 evaluations of 80 items. The items differ: their rates are uniform from 0 to 1."""
    monkeypatch.setattr(statistics, "RESAMPLES", 400)  # a fifth of the time
    source = random.Random(11)
    evaluations = 400
    covered = {"one answer": 0, "eight answers": 0, "lift": 0, "answers as if independent": 0}
    for number in range(evaluations):
        rates = [source.random() for _ in range(80)]
        one, eight = (
            [sum(source.random() < rate for _ in range(n)) / n for rate in rates] for n in (1, 8)
        )
        better = [
            sum(source.random() < 0.9 * rate + 0.1 for _ in range(8)) / 8 for rate in rates
        ]  # + 0.1 * (1 - rate), on average 0.05
        lift = difference_interval(eight, better, seed=number)
        covered["one answer"] += _holds(mean_interval(one), 0.5)
        covered["eight answers"] += _holds(mean_interval(eight, seed=number), 0.5)
        covered["lift"] += _holds(lift, 0.05)
        naive = wilson(round(sum(eight) * 8), 8 * len(eight))
        covered["answers as if independent"] += _holds(naive, 0.5)
    shares = {name: count / evaluations for name, count in covered.items()}
    assert shares.pop("answers as if independent") < 0.85
    assert all(0.92 <= share <= 0.98 for share in shares.values()), shares


def _holds(interval: Interval | None, truth: float) -> bool:
    return interval is not None and interval.low <= truth <= interval.high
