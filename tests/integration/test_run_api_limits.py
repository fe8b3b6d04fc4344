"""When the queue fills, environments slow down, then submissions wait, then get 503."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.fixtures.run_api import start_run_api
from tests.integration.run_api_calls import (
    group,
    next_batch,
    register_environment,
    start,
    status,
    submit,
    told,
)

FULL = 4
PATIENT_S = 60.0
"""Wait for room in tests that make room: the longest allowed value."""
WAIT_S = 0.5
"""Wait for room in tests that make none."""


@contextmanager
def run_api(redis_url: str, directory: Path, wait_s: float) -> Iterator[httpx.Client]:
    """A client of a run-api whose queue holds four groups."""
    further = {"--max-queued-groups": FULL, "--full-queue-wait-s": wait_s}
    api = start_run_api(redis_url, directory, run_id="limited", further=further)
    with httpx.Client(base_url=api.url, timeout=2 * PATIENT_S) as client:
        yield client
    api.process.stop()


@pytest.fixture(scope="module")
def _client(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with run_api(redis_url, tmp_path_factory.mktemp("limited"), PATIENT_S) as client:
        yield client


@pytest.fixture
def limited(_client: httpx.Client) -> httpx.Client:
    """A run with batches of two groups and a queue of four."""
    _client.get("/reset_data").raise_for_status()
    start(_client)
    return _client


def test_environments_are_told_before_anything_is_held(limited: httpx.Client) -> None:
    register_environment(limited)
    submit(limited, *range(FULL - 1), env_id=0)
    assert told(limited, 0)["pressure"] == 0.5
    submit(limited, 9, env_id=0)
    assert told(limited, 0)["pressure"] == 1.0


def test_a_submission_waits_until_there_is_room(limited: httpx.Client) -> None:
    submit(limited, *range(FULL))
    url = limited.base_url
    with closing(http.client.HTTPConnection(url.host, url.port, timeout=2 * PATIENT_S)) as held:
        held.request("POST", "/scored_data", json.dumps(group(9)))
        for _ in range(3):  # sent later, so the group would already be queued if it did not wait
            assert status(limited) == (0, FULL)
        assert next_batch(limited) == [0, 1]
        assert json.load(held.getresponse()) == {"status": "received"}
    assert status(limited) == (1, FULL - 1)


def test_a_queue_that_stays_full_is_a_503_and_nothing_is_queued(
    limited: httpx.Client, redis_url: str, tmp_path: Path
) -> None:
    submit(limited, *range(FULL))
    with run_api(redis_url, tmp_path, WAIT_S) as impatient:
        answer = impatient.post("/scored_data", json=group(8))
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert "queue has been full" in answer.json()["detail"]
    assert status(limited) == (0, FULL)


def test_a_limit_below_one_batch_does_not_stop_the_run(limited: httpx.Client) -> None:
    limited.get("/reset_data").raise_for_status()
    start(limited, batch_size=4 * FULL)
    submit(limited, *range(2 * FULL))
    assert next_batch(limited) == list(range(2 * FULL))
