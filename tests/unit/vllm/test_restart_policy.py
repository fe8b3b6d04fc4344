from __future__ import annotations

import pytest

from grpo_vllm.supervisor.restart_policy import STABLE_AFTER_S, RestartPolicy


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_delays_double_up_to_half_a_minute_until_a_command_starts_over() -> None:
    policy = RestartPolicy(limit=8, clock=Clock())
    delays = [policy.delay_after_failure() for _ in range(8)]
    assert delays == [1, 2, 4, 8, 16, 30, 30, None]
    policy.forget()
    assert policy.delay_after_failure() == 1


@pytest.mark.parametrize(
    ("serves", "for_s", "delay"),
    [(True, STABLE_AFTER_S - 1, None), (True, STABLE_AFTER_S, 1), (False, 1e6, None)],
)
def test_only_an_engine_that_served_for_a_while_ends_a_series(
    serves: bool, for_s: float, delay: float | None
) -> None:
    clock = Clock()
    policy = RestartPolicy(limit=2, clock=clock)
    policy.serving()
    policy.delay_after_failure()
    if serves:
        policy.serving()
    clock.now += for_s
    assert policy.delay_after_failure() == delay
