"""The numbers of `/metrics` after known requests. One by one: `unit/api/test_metrics`."""

from __future__ import annotations

import gzip
import json

import httpx

from tests.fixtures.run_api import MAX_BODY_BYTES
from tests.integration.run_api_calls import (
    REGISTRATION,
    acknowledge,
    disconnect,
    group,
    lease,
    register_environment,
    run_facts,
    scrape,
    send,
    start,
    submit,
)
from tests.support.wait import wait_for


def assert_facts(http: httpx.Client, **expected: float) -> None:
    facts = run_facts(http)
    assert {name: facts[name] for name in expected} == expected


class Growth:
    """By how much series have grown since this was made."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._before = scrape(http)

    def of(self, name: str, **labels: str) -> float:
        series = (f"run_api_{name}", tuple(sorted(labels.items())))
        return scrape(self._http)[series] - self._before.get(series, 0)


def test_requests_are_counted_by_route_and_status(http: httpx.Client) -> None:
    grown = Growth(http)
    for _ in range(3):
        http.get("/status")
    http.post("/status")
    for path in ("/nowhere/1", "/nowhere/2", "/status/"):
        http.get(path)
    for batch_id in (7, 8):
        http.post(f"/batch/{batch_id}/ack")
    assert grown.of("requests_total", method="GET", route="/status", status="200") == 3
    assert grown.of("requests_total", method="POST", route="/status", status="405") == 1
    assert grown.of("requests_total", method="GET", route="unmatched", status="404") == 2
    ack = "/batch/{batch_id}/ack"
    assert grown.of("requests_total", method="POST", route=ack, status="422") == 2
    assert grown.of("request_duration_seconds_count", route="/status") == 4
    assert grown.of("request_duration_seconds_sum", route="/status") > 0
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


def test_the_queue_and_what_waits_beside_it(http: httpx.Client) -> None:
    empty = ("queued_groups", "queued_bytes", "leased_batches", "environments_alive", "step")
    ages = ("oldest_queued_group_age_seconds", "oldest_lease_age_seconds")
    assert_facts(http, **dict.fromkeys((*empty, *ages), 0.0))
    start(http, starting_step=5)
    env_id = register_environment(http)["env_id"]
    register_environment(http)
    submit(http, 1)
    one = run_facts(http)
    submit(http, 2, size=4)
    send(http, 3, size=1, env_id=env_id)
    two = run_facts(http)
    assert 50 < one["queued_bytes"] < two["queued_bytes"]
    assert two["buffered_bytes"] > 30
    age = ages[0]
    wait_for(lambda: run_facts(http)[age], lambda older: older > one[age])
    assert_facts(http, queued_groups=2, queued_sequences=6, buffered_parts=1)
    assert_facts(http, step=5, batches_delivered_total=0)
    assert_facts(http, environments_registered=2, environments_alive=2)
    disconnect(http, env_id)
    assert_facts(http, environments_registered=2, environments_alive=1)
    assert_facts(http, buffered_parts=0, buffered_bytes=0)


def test_leases_until_they_are_acknowledged(http: httpx.Client) -> None:
    start(http)
    submit(http, 1, 2, 3, 4)
    queued_bytes = run_facts(http)["queued_bytes"]
    trainer = http.post("/register", json=REGISTRATION).json()["uuid"]
    assert [lease(http, trainer, after).json()["batch_id"] for after in (0, 1)] == [1, 2]
    assert_facts(http, step=2, batches_delivered_total=2, leased_batches=2)
    assert_facts(http, queued_groups=0, queued_bytes=0, leased_bytes=queued_bytes)
    assert_facts(http, batches_redelivered_total=0)
    wait_for(lambda: run_facts(http)["oldest_lease_age_seconds"])

    assert lease(http, trainer).json()["batch_id"] == 1
    assert_facts(http, batches_redelivered_total=1)
    acknowledge(http, trainer, 1).raise_for_status()
    assert_facts(http, batches_acknowledged_total=1, leased_batches=1)
    assert 0 < run_facts(http)["leased_bytes"] < queued_bytes
    acknowledge(http, trainer, 2).raise_for_status()
    assert_facts(http, leased_bytes=0, oldest_lease_age_seconds=0)
    assert_facts(http, batches_delivered_total=2, batches_redelivered_total=1)
