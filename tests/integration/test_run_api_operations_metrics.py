"""The numbers of `/metrics` after known requests."""

from __future__ import annotations

import gzip
import json
import time
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.fixtures.run_api import MAX_BODY_BYTES
from tests.integration.run_api_calls import (
    REGISTRATION,
    disconnect,
    group,
    next_batch,
    register_environment,
    send,
    start,
    submit,
)
from tests.support.process_table import eventually

Series = tuple[str, tuple[tuple[str, str], ...]]


def scrape(http: httpx.Client) -> dict[Series, float]:
    answer = http.get("/metrics").raise_for_status()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def run(http: httpx.Client) -> dict[str, float]:
    """What is told of the run, without the prefix.

    A scrape gives Redis a second, too little on a busy machine, and then tells nothing of it.
    """
    told: dict[str, float] = {}

    def redis_has_answered() -> bool:
        told.update({name.removeprefix("run_api_"): v for (name, _), v in scrape(http).items()})
        return told["redis_up"] == 1

    assert eventually(redis_has_answered)
    return told


class Growth:
    """By how much series have grown since this was made."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._before = scrape(http)

    def of(self, name: str, **labels: str) -> float:
        series = (f"run_api_{name}", tuple(sorted(labels.items())))
        return scrape(self._http)[series] - self._before.get(series, 0)


def test_requests_are_counted_by_route_and_status(http: httpx.Client) -> None:
    grown, began = Growth(http), time.monotonic()
    for _ in range(3):
        http.get("/status")
    http.post("/status")
    for path in ("/nowhere/1", "/nowhere/2", "/status/"):
        http.get(path)
    http.post("/batch/7/ack")
    http.post("/batch/8/ack")
    assert grown.of("requests_total", method="GET", route="/status", status="200") == 3
    assert grown.of("requests_total", method="POST", route="/status", status="405") == 1
    assert grown.of("requests_total", method="GET", route="unmatched", status="404") == 2
    ack = "/batch/{batch_id}/ack"
    assert grown.of("requests_total", method="POST", route=ack, status="422") == 2
    assert grown.of("request_duration_seconds_count", route="/status") == 4
    took_s = grown.of("request_duration_seconds_sum", route="/status")
    assert 0 < took_s < time.monotonic() - began
    assert not [labels for _, labels in scrape(http) if "nowhere" in str(labels)]


def test_bodies_are_counted_as_sent(http: httpx.Client) -> None:
    start(http)
    grown = Growth(http)
    body = gzip.compress(json.dumps(group(1, images="x" * 5000)).encode())
    sent = http.post("/scored_data", content=body, headers={"Content-Encoding": "gzip"})
    assert sent.status_code == 200
    assert grown.of("request_body_bytes_total", route="/scored_data") == len(body)
    http.post("/scored_data_list", content=b" " * (MAX_BODY_BYTES + 1))
    refused = {"method": "POST", "route": "/scored_data_list", "status": "413"}
    assert grown.of("requests_total", **refused) == 1


def test_an_empty_run(http: httpx.Client) -> None:
    told = run(http)
    assert told["redis_up"] == 1
    expected = ("step", "queued_groups", "queued_bytes", "leased_batches", "environments_alive")
    assert [told[name] for name in expected] == [0] * len(expected)
    assert told["oldest_queued_group_age_seconds"] == told["oldest_lease_age_seconds"] == 0


def test_the_queue_and_what_waits_beside_it(http: httpx.Client) -> None:
    start(http, starting_step=5)
    env_id = register_environment(http)["env_id"]
    register_environment(http)
    submit(http, 1)
    one = run(http)
    submit(http, 2, size=4)
    send(http, 3, size=1, env_id=env_id)
    told = run(http)
    assert (told["queued_groups"], told["queued_sequences"]) == (2, 6)
    assert one["queued_bytes"] > 50
    assert told["queued_bytes"] > one["queued_bytes"]
    assert told["buffered_parts"] == 1
    assert told["buffered_bytes"] > 30
    assert 0 < told["oldest_queued_group_age_seconds"] < 30
    assert told["oldest_queued_group_age_seconds"] > one["oldest_queued_group_age_seconds"]
    assert (told["step"], told["batches_delivered_total"]) == (5, 0)
    assert (told["environments_registered"], told["environments_alive"]) == (2, 2)
    disconnect(http, env_id)
    told = run(http)
    assert (told["environments_registered"], told["environments_alive"]) == (2, 1)
    assert (told["buffered_parts"], told["buffered_bytes"]) == (0, 0)


def lease(http: httpx.Client, trainer: int, after: int) -> Any:
    return http.get("/batch", params={"trainer": trainer, "after": after}).json()


def test_leases_until_they_are_acknowledged(http: httpx.Client) -> None:
    start(http)
    submit(http, 1, 2, 3, 4)
    queued = run(http)
    trainer = http.post("/register", json=REGISTRATION).json()["uuid"]
    assert [lease(http, trainer, after)["batch_id"] for after in (0, 1)] == [1, 2]
    told = run(http)
    assert (told["step"], told["batches_delivered_total"], told["leased_batches"]) == (2, 2, 2)
    assert (told["queued_groups"], told["queued_bytes"]) == (0, 0)
    assert told["leased_bytes"] == queued["queued_bytes"]
    assert 0 < told["oldest_lease_age_seconds"] < 30
    assert told["batches_redelivered_total"] == 0

    assert lease(http, trainer, 0)["batch_id"] == 1
    assert run(http)["batches_redelivered_total"] == 1

    http.post("/batch/1/ack", params={"trainer": trainer}).raise_for_status()
    told = run(http)
    assert (told["batches_acknowledged_total"], told["leased_batches"]) == (1, 1)
    assert 0 < told["leased_bytes"] < queued["queued_bytes"]
    http.post("/batch/2/ack", params={"trainer": trainer}).raise_for_status()
    told = run(http)
    assert (told["leased_bytes"], told["oldest_lease_age_seconds"]) == (0, 0)
    assert (told["batches_delivered_total"], told["batches_redelivered_total"]) == (2, 1)


def test_a_trainer_that_only_polls_acknowledges_so(http: httpx.Client) -> None:
    start(http)
    submit(http, 1, 2)
    assert next_batch(http) == [1, 2]
    assert run(http)["leased_batches"] == 1
    assert next_batch(http) is None
    told = run(http)
    assert (told["leased_batches"], told["batches_acknowledged_total"]) == (0, 1)
