"""Restarts of a real engine while requests come in: none fails, and each names its weights."""

from __future__ import annotations

import pytest

from grpo_core.handoff import Action
from tests.fixtures.adapters import load
from tests.fixtures.handed_off import HandedOffServer
from tests.fixtures.inference import FILE_MOVED, FILE_NOISE
from tests.inference.engine_load import wait_for
from tests.inference.request_load import load_on

RESTARTS = 3
PROMPT = [5, 6, 7]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("mode", "action"),
    [("lora", Action.RESTART_WITH_ADAPTER), ("plain", Action.RESTART_WITH_CHECKPOINT)],
    ids=["lora_restart", "none"],
)
def test_no_request_fails_in_three_restarts_under_load(
    mode: str, action: Action, request: pytest.FixtureRequest
) -> None:
    handed: HandedOffServer = request.getfixturevalue(mode)
    before = handed.server.status()
    versions = []
    with load_on(handed.server.url) as report:
        for i in range(RESTARTS):
            seen = report.answered
            wait_for(lambda seen=seen: report.answered > seen + 12, deadline_s=60.0)  # type: ignore[misc]
            versions.append(handed.publish(handed.weights[i], action))
        seen = report.answered
        wait_for(lambda: report.answered > seen + 12, deadline_s=60.0)
    assert report.problems == []
    assert {tuple(version) for version in versions} <= set(report.versions)
    assert handed.difference(load(handed.server.model, handed.weights[2]), PROMPT) < FILE_NOISE
    assert handed.difference(load(handed.server.model, handed.weights[1]), PROMPT) > FILE_MOVED
    after = handed.server.status()
    assert after["restarts"] - before["restarts"] == RESTARTS
    assert after["dropped_requests"] == 0
    assert after["crashes"] == before["crashes"]
