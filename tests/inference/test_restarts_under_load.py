"""Restarts of a real engine while requests come in: none fails, and each names its weights."""

from __future__ import annotations

import pytest

from grpo_core.handoff import Action
from tests.fixtures.adapters import load
from tests.fixtures.handed_off import HandedOffServer
from tests.fixtures.inference import FILE_MOVED, FILE_NOISE
from tests.inference.request_load import CLIENTS, load_on

RESTARTS = 3
PROMPT = [5, 6, 7]


@pytest.mark.timeout(1800)
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
            report.wait_for_answers(CLIENTS + 1)  # so that one began after the restart before
            versions.append(handed.publish(handed.weights[i], action))
        report.wait_for_answers(CLIENTS + 1)
    assert report.problems == []
    assert {tuple(version) for version in versions} <= set(report.versions)
    assert handed.difference(load(handed.server.model, handed.weights[2]), PROMPT) < FILE_NOISE
    assert handed.difference(load(handed.server.model, handed.weights[1]), PROMPT) > FILE_MOVED
    after = handed.server.status()
    assert after["restarts"] - before["restarts"] == RESTARTS
    assert after["dropped_requests"] == 0
    assert after["crashes"] == before["crashes"]
