"""Requests and groups for the tests of run-api."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.support.scraping import series
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


class ApiClient(httpx.Client):
    """A client of a run-api with the calls of trainers and environments."""

    def register(self, **changes: Any) -> httpx.Response:
        return self.post("/register", json=REGISTRATION | changes)

    def start(self, **changes: Any) -> None:
        """Register a trainer and poll once, so that environments can register."""
        self.register(**changes).raise_for_status()
        assert self.get("/batch").json() == {"batch": None}

    def register_environment(self, **changes: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.post("/register-env", json=ENVIRONMENT | changes).json()
        return answer

    def disconnect(self, env_id: int) -> dict[str, Any]:
        answer: dict[str, Any] = self.post("/disconnect-env", json={"env_id": env_id}).json()
        return answer

    def send_group(self, marker: int, **changes: Any) -> dict[str, Any]:
        answer = self.post("/scored_data", json=group(marker, **changes)).raise_for_status()
        received: dict[str, Any] = answer.json()
        return received

    def submit(self, *markers: int, **changes: Any) -> None:
        """Submit whole groups."""
        for marker in markers:
            assert self.send_group(marker, **changes) == {"status": "received"}

    def send_raw(self, body: Any, path: str = "/scored_data") -> httpx.Response:
        """JSON text that may contain NaN, which httpx does not write."""
        return self.post(path, content=json.dumps(body))

    def next_batch(self) -> list[int] | None:
        """The markers of the groups in the next batch."""
        batch = self.get("/batch").raise_for_status().json()["batch"]
        return None if batch is None else [item["tokens"][0][0] for item in batch]

    def status(self) -> tuple[int, int]:
        """current_step, queue_size"""
        answer = self.get("/status").raise_for_status().json()
        return answer["current_step"], answer["queue_size"]

    def status_env(self, env_id: Any) -> httpx.Response:
        return self.request("GET", "/status-env", json={"env_id": env_id})

    def probe(self, path: str) -> httpx.Response:
        """Retry until Redis answers: a probe waits one second, too little on a busy machine."""
        return wait_for(
            lambda: self.get(path), lambda answer: "Redis did not answer within" not in answer.text
        )

    def told(self, env_id: int) -> dict[str, Any]:
        """The answer of `/status-env` to an environment."""
        answer: dict[str, Any] = self.status_env(env_id).raise_for_status().json()
        return answer

    def lease(self, trainer: int, after: int = 0, **more: float) -> httpx.Response:
        return self.get("/batch", params={"trainer": trainer, "after": after, **more})

    def acknowledge(self, trainer: int, batch_id: int) -> httpx.Response:
        return self.post(f"/batch/{batch_id}/ack", params={"trainer": trainer})

    def scrape(self) -> dict[str, float]:
        return series(self.get("/metrics").raise_for_status().text)

    def run_facts(self) -> dict[str, float]:
        """The metrics of the run, without the prefix.

        A scrape waits one second for Redis, too little on a busy machine, and then omits the run.
        """
        return wait_for(
            lambda: {name.removeprefix("run_api_"): v for name, v in self.scrape().items()},
            lambda facts: facts["redis_up"] == 1,
        )


def leased(answer: httpx.Response) -> tuple[int, list[int]]:
    """The batch's id and the markers of its groups."""
    found = answer.raise_for_status().json()
    return found["batch_id"], [item["tokens"][0][0] for item in found["batch"]]
