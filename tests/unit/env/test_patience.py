from __future__ import annotations

import pytest

from grpo_core.errors import ServiceUnavailable
from grpo_env.patience import EveryGroupRefused, Patience, RefusalLimit
from tests.unit.env.clock import Clock


def test_failures_in_a_row_are_borne_until_the_deadline_after_the_first() -> None:
    clock = Clock()
    patience = Patience("vllm-server", 10.0, clock)

    patience.failed(ServiceUnavailable("one"))
    clock.now += 9.0
    patience.succeeded()
    clock.now += 9.0
    patience.failed(ServiceUnavailable("two"))
    clock.now += 9.9
    patience.failed(ServiceUnavailable("three"))
    clock.now += 0.1
    with pytest.raises(ServiceUnavailable, match=r"vllm-server failed for 10 s in a row.*four"):
        patience.failed(ServiceUnavailable("four"))


def test_the_delay_grows_with_the_outage_and_runs_out() -> None:
    clock = Clock()
    patience = Patience("run-api", 100.0, clock)

    patience.failed(ServiceUnavailable("one"))
    assert patience.delay_s == pytest.approx(0.2)
    clock.now += 2.0
    assert patience.delay_s == 0.0
    patience.failed(ServiceUnavailable("two"))
    assert patience.delay_s == pytest.approx(2.0)
    clock.now += 60.0
    patience.failed(ServiceUnavailable("three"))
    assert patience.delay_s == pytest.approx(5.0)
    patience.succeeded()
    assert patience.delay_s == 0.0


def test_sixteen_refusals_in_a_row_are_a_wrong_setting() -> None:
    limit = RefusalLimit("generation")
    for _ in range(15):
        limit.refused("no")
    limit.accepted()
    for _ in range(15):
        limit.refused("no")

    with pytest.raises(EveryGroupRefused, match=r"16 groups in a row .* generation.*context"):
        limit.refused("beyond the context")
