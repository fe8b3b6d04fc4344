from __future__ import annotations

import pytest

from grpo_vllm.supervisor.restart_policy import STABLE_AFTER_S, RestartPolicy


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_delays_double_and_end() -> None:
    policy = RestartPolicy(limit=8, clock=Clock())
    delays = [policy.delay_after_failure() for _ in range(8)]
    assert delays == [1, 2, 4, 8, 16, 30, 30, None]


@pytest.mark.parametrize(
    ("served_s", "expected"), [(STABLE_AFTER_S - 1, None), (STABLE_AFTER_S, 1.0)]
)
def test_only_an_engine_that_served_for_a_while_ends_a_series(
    served_s: float, expected: float | None
) -> None:
    clock = Clock()
    policy = RestartPolicy(limit=2, clock=clock)
    policy.delay_after_failure()
    policy.serving()
    clock.now += served_s
    assert policy.delay_after_failure() == expected


def test_an_engine_that_never_came_up_again_ends_no_series() -> None:
    clock = Clock()
    policy = RestartPolicy(limit=3, clock=clock)
    policy.serving()
    clock.now += 10 * STABLE_AFTER_S
    assert policy.delay_after_failure() == 1.0
    clock.now += 10 * STABLE_AFTER_S
    assert policy.delay_after_failure() == 2.0
    assert policy.delay_after_failure() is None
    policy.forget()
    assert policy.delay_after_failure() == 1.0
