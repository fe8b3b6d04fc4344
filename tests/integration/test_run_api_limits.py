"""A queue that fills up: environments are slowed, then submissions wait, then they are refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.fixtures.run_api import start_run_api
from tests.integration.run_api_calls import (
    group,
    next_batch,
    register,
    register_environment,
    send,
    start,
    status,
    submit,
    told,
)
from tests.integration.test_run_api_operations_metrics import scrape

FULL = 4
PATIENT_S = 60.0
"""How long a submission waits for room where a test makes some: as long as may be asked for."""
WAIT_S = 1.0
"""The same where there is to be none."""
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


@pytest.fixture
def impatient(redis_url: str, tmp_path: Path) -> Iterator[httpx.Client]:
    """Another replica of the same run, where submissions wait for a second."""
    with run_api(redis_url, tmp_path, WAIT_S) as client:
        yield client


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def post(url: httpx.URL, marker: int, **changes: int) -> httpx.Response:
    return httpx.post(f"{url}/scored_data", json=group(marker, **changes), timeout=2 * PATIENT_S)


def test_environments_are_told_before_anything_is_held(limited: httpx.Client) -> None:
    register_environment(limited)
    pressures = [told(limited, 0)["pressure"]]
    for marker in range(FULL):
        send(limited, marker, env_id=0)
        pressures.append(told(limited, 0)["pressure"])
    assert pressures == [0.0, 0.0, 0.0, 0.5, 1.0]
    assert told(limited, 0)["env_weight"] == 0.01


def test_a_submission_waits_until_there_is_room(
    limited: httpx.Client, pool: ThreadPoolExecutor
) -> None:
    submit(limited, *range(FULL))
    held = pool.submit(post, limited.base_url, 9)
    time.sleep(0.3)
    assert not held.done()
    assert status(limited) == (0, FULL)
    assert next_batch(limited) == [0, 1]
    assert held.result().json() == {"status": "received"}
    assert status(limited) == (1, FULL - 1)


def test_a_queue_that_stays_full_is_a_503_and_nothing_is_queued(
    limited: httpx.Client, impatient: httpx.Client, pool: ThreadPoolExecutor
) -> None:
    submit(limited, *range(FULL))
    patient = pool.submit(post, limited.base_url, 7)
    time.sleep(0.3)  # so that it came first
    began = time.monotonic()
    held = [pool.submit(post, impatient.base_url, marker) for marker in (8, 9)]
    answers = [future.result() for future in held]
    assert time.monotonic() - began >= WAIT_S
    for answer in answers:
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert "queue has been full" in answer.json()["detail"]
    assert status(limited) == (0, FULL)
    assert next_batch(limited) == [0, 1]
    assert patient.result().json() == {"status": "received"}  # its own option is heeded as well


def test_whom_the_next_batch_waits_for_need_not_wait(limited: httpx.Client) -> None:
    """Else a queue full of the others' data would never drain."""
    register_environment(limited)
    register_environment(limited, min_batch_allocation=0.5)
    submit(limited, *range(FULL), env_id=0)
    assert next_batch(limited) is None
    assert told(limited, 1)["pressure"] == 0.0
    began = time.monotonic()
    submit(limited, 9, env_id=1)
    assert time.monotonic() - began < PATIENT_S / 2
    assert next_batch(limited) == [0, 9]


def test_a_limit_below_one_batch_does_not_stop_the_run(limited: httpx.Client) -> None:
    limited.get("/reset_data").raise_for_status()
    start(limited, batch_size=4 * FULL)
    submit(limited, *range(2 * FULL))
    assert next_batch(limited) == list(range(2 * FULL))


def test_a_held_submission_under_a_key_is_queued_once(
    limited: httpx.Client, pool: ThreadPoolExecutor
) -> None:
    submit(limited, *range(FULL))
    key = {"Idempotency-Key": "held"}
    url = f"{limited.base_url}/scored_data"
    before = finished_submissions(limited)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=group(9), headers=key, timeout=httpx.Timeout(PATIENT_S, read=0.2))
    repeated = pool.submit(httpx.post, url, json=group(9), headers=key, timeout=2 * PATIENT_S)
    time.sleep(0.3)  # so that it is held too
    assert next_batch(limited) == [0, 1]
    assert repeated.result().json() == {"status": "received"}
    give_up_at = time.monotonic() + PATIENT_S
    while finished_submissions(limited) < before + 2:
        assert time.monotonic() < give_up_at
        time.sleep(0.02)
    assert status(limited) == (1, FULL - 1)


def finished_submissions(http: httpx.Client) -> float:
    """Those that run-api is done with, whether or not their senders were there to hear of it."""
    return sum(
        value
        for (name, labels), value in scrape(http).items()
        if name == "run_api_requests_total" and ("route", "/scored_data") in labels
    )


def test_leases_that_hold_too_much_have_to_be_acknowledged(limited: httpx.Client) -> None:
    trainer = register(limited).json()["uuid"]
    asked: dict[str, int] = {"trainer": trainer, "after": 0}
    while True:
        submit(limited, 0, 1)
        answer = limited.get("/batch", params=asked)
        if answer.status_code != 200:
            break
        asked["after"] = answer.json()["batch_id"]
        assert asked["after"] < 20
    assert answer.status_code == 409
    assert answer.json()["detail"][0]["type"] == "leases_full"
    limited.post(f"/batch/{asked['after']}/ack", params={"trainer": trainer}).raise_for_status()
    assert limited.get("/batch", params=asked).json()["batch_id"] == asked["after"] + 1
