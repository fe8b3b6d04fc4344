"""The run ends if all environments have left, and refused groups are named; a fake clock replaces
waiting."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from grpo_core.wire.run_api import EnvironmentCount
from grpo_trainer.data.batches import EnvironmentWatch
from grpo_trainer.errors import NoEnvironmentLeft

NOBODY_YET = EnvironmentCount(registered=0, connected=0)
GONE = EnvironmentCount(registered=2, connected=0)
BACK = EnvironmentCount(registered=3, connected=1)


def test_environments_that_left_have_the_deadline_to_come_back() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    watch = EnvironmentWatch(60.0, clock=lambda: now[0])
    with capture_logs() as logs:
        watch.wait_started()
        for _ in range(2):  # environments of an earlier start; the new ones are not up yet
            watch.check(GONE)
            sleep(1000.0)
        watch.wait_ended()  # one has sent a batch
        watch.wait_started()
        for count, then_s in (
            *((NOBODY_YET, 1000.0), (GONE, 59.0), (GONE, 0.5)),
            *((BACK, 1000.0), (GONE, 59.0), (GONE, 0.0)),
        ):
            watch.check(count)
            sleep(then_s)
        watch.excluding(lambda: sleep(1000.0))
        watch.check(GONE)
        sleep(1.0)
        with pytest.raises(
            NoEnvironmentLeft, match=r"2 environments that registered in this run.* within 60 s"
        ):
            watch.check(GONE)
    assert [entry["event"] for entry in logs] == ["environments.disconnected"] * 2


def refused(groups: int, reason: str, connected: int = 1) -> EnvironmentCount:
    return EnvironmentCount(
        registered=1, connected=connected, refused_groups=groups, last_refusal=reason
    )


def test_refused_groups_are_named_once_in_each_wait_in_which_their_number_has_risen() -> None:
    now = [0.0]
    watch = EnvironmentWatch(60.0, clock=lambda: now[0])
    waits = [
        [refused(0, ""), refused(2, "first"), refused(9, "second")],
        [refused(9, "second"), refused(9, "second")],
        [refused(10, "third")],  # refused before the wait began
    ]
    with capture_logs() as logs:
        for counts in waits:
            watch.wait_started()
            for count in counts:
                watch.check(count)
                now[0] += 1000.0  # environments that poll are not gone
            watch.wait_ended()
    told = [(entry["event"], entry["refused_groups"], entry["last_refusal"]) for entry in logs]
    assert told == [("groups.refused", 2, "first"), ("groups.refused", 1, "third")]
    assert all("correct the environment" in entry["hint"] for entry in logs)


def test_environments_that_left_after_refusals_are_named_with_the_last_reason() -> None:
    now = [0.0]
    watch = EnvironmentWatch(60.0, clock=lambda: now[0])
    watch.wait_started()
    watch.check(refused(0, ""))
    watch.check(refused(5, "scores.1: not finite", connected=0))
    now[0] += 60.0
    with pytest.raises(NoEnvironmentLeft, match=r"registered: 5; the last reason: scores\.1: not"):
        watch.check(refused(5, "scores.1: not finite", connected=0))
