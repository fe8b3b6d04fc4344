"""A queue that fills up: environments are slowed, then submissions wait, then they are refused."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.fixtures.run_api import start_run_api
from tests.integration.run_api_calls import (
    acknowledge,
    group,
    lease,
    next_batch,
    register,
    register_environment,
    scrape,
    start,
    status,
    submit,
    told,
)
from tests.support.wait import wait_for

FULL = 4
PATIENT_S = 60.0
"""How long a submission waits for room if a test makes some: as long as may be asked for."""
WAIT_S = 0.5
"""The same if there is to be none."""
LEASED_BYTES = 1024


@contextmanager
def run_api(redis_url: str, directory: Path, wait_s: float) -> Iterator[httpx.Client]:
    """A client of a run-api whose queue takes four groups."""
    further = {
        "--max-queued-groups": FULL,
        "--full-queue-wait-s": wait_s,
        "--max-leased-bytes": LEASED_BYTES,
    }
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
    """A run with batches of two groups, whose queue takes four."""
    _client.get("/reset_data").raise_for_status()
    start(_client)
    return _client


@contextmanager
def held_submission(limited: httpx.Client) -> Iterator[http.client.HTTPConnection]:
    """Group 9 under a key, sent to a full queue."""
    url = limited.base_url
    connection = http.client.HTTPConnection(url.host, url.port, timeout=2 * PATIENT_S)
    connection.request("POST", "/scored_data", json.dumps(group(9)), {"Idempotency-Key": "held"})
    for _ in range(3):  # sent later, so by now the group would be queued if it were not held
        assert status(limited) == (0, FULL)
    yield connection
    connection.close()


def test_environments_are_told_before_anything_is_held(limited: httpx.Client) -> None:
    register_environment(limited)
    submit(limited, *range(FULL - 1), env_id=0)
    assert told(limited, 0)["pressure"] == 0.5
    submit(limited, 9, env_id=0)
    assert told(limited, 0)["pressure"] == 1.0


def test_a_submission_waits_until_there_is_room(limited: httpx.Client) -> None:
    submit(limited, *range(FULL))
    with held_submission(limited) as held:
        assert next_batch(limited) == [0, 1]
        assert json.load(held.getresponse()) == {"status": "received"}
    assert status(limited) == (1, FULL - 1)


def test_a_held_submission_under_a_key_is_queued_once(limited: httpx.Client) -> None:
    submit(limited, *range(FULL))
    before = finished_submissions(limited)
    with held_submission(limited), held_submission(limited) as repeated:
        assert next_batch(limited) == [0, 1]
        assert json.load(repeated.getresponse()) == {"status": "received"}
        wait_for(lambda: finished_submissions(limited), lambda finished: finished == before + 2)
    assert status(limited) == (1, FULL - 1)


def finished_submissions(http: httpx.Client) -> float:
    return sum(
        value
        for (name, labels), value in scrape(http).items()
        if name == "run_api_requests_total" and ("route", "/scored_data") in labels
    )


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


def test_leases_that_hold_too_much_have_to_be_acknowledged(limited: httpx.Client) -> None:
    trainer = register(limited).json()["uuid"]
    leased = 0
    submit(limited, 0, 1)
    while (answer := lease(limited, trainer, leased)).status_code == 200:
        leased = answer.json()["batch_id"]
        assert leased < 20
        submit(limited, 0, 1)
    assert answer.status_code == 409
    assert answer.json()["detail"][0]["type"] == "leases_full"
    acknowledge(limited, trainer, leased).raise_for_status()
    assert lease(limited, trainer, leased).json()["batch_id"] == leased + 1
