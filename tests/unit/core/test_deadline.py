from __future__ import annotations

from grpo_core.deadline import Deadline


def test_time_that_does_not_count_moves_the_end() -> None:
    now = [100.0]
    deadline = Deadline(10.0, clock=lambda: now[0])
    now[0] += 4.0
    assert (deadline.left_s, deadline.has_passed) == (6.0, False)
    with deadline.suspended():
        now[0] += 50.0
    assert (deadline.left_s, deadline.has_passed) == (6.0, False)
    now[0] += 6.0
    assert (deadline.left_s, deadline.has_passed) == (0.0, True)
