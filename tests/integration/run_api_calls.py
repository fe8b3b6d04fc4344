"""Requests and groups for the tests of run-api."""

from __future__ import annotations

import json
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.wait import wait_for

REGISTRATION: dict[str, Any] = {
    "wandb_group": "group",
    "wandb_project": "project",
    "batch_size": 4,
    "max_token_len": 128,
    "checkpoint_dir": "checkpoints",
    "save_checkpoint_interval": 5,
    "starting_step": 0,
    "num_steps": 100,
}

ENVIRONMENT: dict[str, Any] = {
    "max_token_length": 128,
    "desired_name": "math",
    "weight": 1.0,
    "group_size": 2,
    "min_batch_allocation": None,
}

WAITING = {"status": "wait for trainer to start"}


def group(marker: int, size: int = 2, **changes: Any) -> dict[str, Any]:
    """A valid group whose first token is a marker."""
    return {
        "tokens": [[marker, 7, 90 + i] for i in range(size)],
        "masks": [[-100, -100, 90 + i] for i in range(size)],
        "scores": [float(i) for i in range(size)],
        **changes,
    }


def bulky(marker: int, tokens: int = 1000) -> dict[str, Any]:
    """Changes to `group` that make it several kilobytes, even compressed."""
    noise = [marker, *((i * 7919) % 100_003 for i in range(1, tokens))]
    return {"tokens": [noise, noise], "masks": [noise, noise]}


def register(http: httpx.Client, **changes: Any) -> httpx.Response:
    return http.post("/register", json=REGISTRATION | changes)


def start(http: httpx.Client, **changes: Any) -> None:
    """Register a trainer and poll once, so that environments can register."""
    register(http, **changes).raise_for_status()
    assert http.get("/batch").json() == {"batch": None}


def register_environment(http: httpx.Client, **changes: Any) -> dict[str, Any]:
    answer: dict[str, Any] = http.post("/register-env", json=ENVIRONMENT | changes).json()
    return answer


def disconnect(http: httpx.Client, env_id: int) -> dict[str, Any]:
    answer: dict[str, Any] = http.post("/disconnect-env", json={"env_id": env_id}).json()
    return answer


def send(http: httpx.Client, marker: int, **changes: Any) -> dict[str, Any]:
    answer = http.post("/scored_data", json=group(marker, **changes)).raise_for_status()
    received: dict[str, Any] = answer.json()
    return received


def submit(http: httpx.Client, *markers: int, **changes: Any) -> None:
    """Submit whole groups."""
    for marker in markers:
        assert send(http, marker, **changes) == {"status": "received"}


def send_raw(http: httpx.Client, body: Any, path: str = "/scored_data") -> httpx.Response:
    """JSON text that may contain NaN, which httpx does not write."""
    return http.post(path, content=json.dumps(body))


def next_batch(http: httpx.Client) -> list[int] | None:
    """The markers of the groups in the next batch."""
    batch = http.get("/batch").raise_for_status().json()["batch"]
    return None if batch is None else [item["tokens"][0][0] for item in batch]


def status(http: httpx.Client) -> tuple[int, int]:
    """current_step, queue_size"""
    answer = http.get("/status").raise_for_status().json()
    return answer["current_step"], answer["queue_size"]


def status_env(http: httpx.Client, env_id: Any) -> httpx.Response:
    return http.request("GET", "/status-env", json={"env_id": env_id})


def probe(http: httpx.Client, path: str) -> httpx.Response:
    """Retry until Redis answers: a probe waits one second, too little on a busy machine."""
    return wait_for(
        lambda: http.get(path), lambda answer: "Redis did not answer within" not in answer.text
    )


def told(http: httpx.Client, env_id: int) -> dict[str, Any]:
    """The answer of `/status-env` to an environment."""
    answer: dict[str, Any] = status_env(http, env_id).raise_for_status().json()
    return answer


def lease(http: httpx.Client, trainer: int, after: int = 0, **more: float) -> httpx.Response:
    """Lease the batch after `after`."""
    return http.get("/batch", params={"trainer": trainer, "after": after, **more})


def leased(answer: httpx.Response) -> tuple[int, list[int]]:
    """The batch's id and the markers of its groups."""
    found = answer.raise_for_status().json()
    return found["batch_id"], [item["tokens"][0][0] for item in found["batch"]]


def acknowledge(http: httpx.Client, trainer: int, batch_id: int) -> httpx.Response:
    return http.post(f"/batch/{batch_id}/ack", params={"trainer": trainer})


def scrape(http: httpx.Client) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every series of `/metrics`, by name and sorted labels."""
    answer = http.get("/metrics").raise_for_status()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def run_facts(http: httpx.Client) -> dict[str, float]:
    """The metrics of the run, without the prefix.

    A scrape waits one second for Redis, too little on a busy machine, and then omits the run.
    """
    return wait_for(
        lambda: {name.removeprefix("run_api_"): v for (name, _), v in scrape(http).items()},
        lambda facts: facts["redis_up"] == 1,
    )
