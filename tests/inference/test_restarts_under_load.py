"""Restarts of a real engine under load: no request fails, and each answer names its weights."""

from __future__ import annotations

import pytest

from grpo_core.weights.supervisor import Action
from tests.fixtures.adapters import load
from tests.fixtures.file_sync import HandedOffServer
from tests.fixtures.inference import FILE_MOVED, FILE_NOISE
from tests.inference.request_load import CLIENTS, load_on

PROMPT = [5, 6, 7]


@pytest.mark.parametrize(
    ("mode", "action", "restarts"),
    [
        ("plain", Action.RESTART_WITH_CHECKPOINT, 1),
        pytest.param("lora", Action.RESTART_WITH_ADAPTER, 1, marks=pytest.mark.full),
        pytest.param("plain", Action.RESTART_WITH_CHECKPOINT, 3, marks=pytest.mark.full),
    ],
)
def test_no_request_fails_in_restarts_under_load(
    mode: str, action: Action, restarts: int, request: pytest.FixtureRequest
) -> None:
    handed: HandedOffServer = request.getfixturevalue(mode)
    before = handed.server.status()
    versions = []
    with load_on(handed.server.url) as report:
        for i in range(restarts):
            report.wait_for_answers(CLIENTS + 1)  # so one began after the previous restart
            versions.append(handed.publish(handed.weights[i], action))
        report.wait_for_answers(CLIENTS + 1)
    assert report.problems == []
    assert {tuple(version) for version in versions} <= set(report.versions)
    last, another = (load(handed.server.model, handed.weights[restarts - i]) for i in (1, 2))
    assert handed.difference(last, PROMPT) < FILE_NOISE
    assert handed.difference(another, PROMPT) > FILE_MOVED
    after = handed.server.status()
    assert after["restarts"] - before["restarts"] == restarts
    assert after["dropped_requests"] == 0
    assert after["crashes"] == before["crashes"]
