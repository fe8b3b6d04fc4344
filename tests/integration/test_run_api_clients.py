"""The archived environment's and trainer's side of the contract, call by call."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx

from tests.integration.run_api_calls import (
    ENVIRONMENT,
    WAITING,
    group,
    register,
    register_environment,
    start,
    status,
    submit,
    told,
)


class ArchivedEnvironment:
    """The decisions of `atroposlib.envs.base`, without its workers."""

    def __init__(self, http: httpx.Client, group_size: int, max_batches_offpolicy: int) -> None:
        self.http = http
        self.group_size = group_size
        self.max_batches_offpolicy = max_batches_offpolicy
        answer = register_environment(http, group_size=group_size)
        self.env_id, self.total_steps = answer["env_id"], answer["num_steps"]
        self.batch_size = http.get("/info").json()["batch_size"]
        self.sent = 0

    def is_done(self, status: dict[str, Any]) -> bool:
        queued = status["queue_size"] * self.group_size // self.batch_size
        return bool(status["current_step"] + queued > self.total_steps)

    def pauses(self, status: dict[str, Any]) -> bool:
        queued = status["queue_size"] * self.group_size
        return bool(queued >= self.max_batches_offpolicy * self.batch_size)

    def send(self) -> None:
        """As `_post_json_with_compression` does: gzip from 1024 bytes on, where it shrinks."""
        messages = [[{"role": "user", "content": "word " * 100}]] * self.group_size
        body = group(self.sent, size=self.group_size, env_id=self.env_id, messages=messages)
        content = json.dumps(body).encode()
        assert len(content) > 1024
        self.http.post(
            "/scored_data",
            content=gzip.compress(content),
            headers={"Content-Type": "application/json", "Content-Encoding": "gzip"},
        ).raise_for_status()
        self.sent += 1


def test_an_environment_starts_up_beside_a_trainer_that_is_late(http: httpx.Client) -> None:
    assert http.get("/wandb_info").json()["project"] is None
    assert register_environment(http) == WAITING
    register(http, wandb_project="")
    assert http.get("/wandb_info").json()["project"] is not None  # an empty string counts
    assert register_environment(http) == WAITING
    http.get("/batch")
    answer = register_environment(http)
    needed = {"env_id", "wandb_name", "starting_step", "checkpoint_dir", "checkpoint_interval"}
    assert {"status", "num_steps", *needed} <= answer.keys()
    assert http.get("/info").json()["batch_size"] != -1


def test_an_environment_without_a_name_dies_of_a_422(http: httpx.Client) -> None:
    start(http)
    nameless = http.post("/register-env", json=ENVIRONMENT | {"desired_name": None})
    assert nameless.status_code == 422


def test_an_environment_paces_itself_until_the_run_is_done(http: httpx.Client) -> None:
    start(http, batch_size=4, num_steps=5)
    environment = ArchivedEnvironment(http, group_size=2, max_batches_offpolicy=2)
    most_queued = delivered = 0
    for _ in range(200):
        seen = told(http, environment.env_id)
        if environment.is_done(seen):
            break
        if environment.pauses(seen):
            assert http.get("/batch").json()["batch"] is not None
            delivered += 1
        else:
            environment.send()
        most_queued = max(most_queued, status(http)[1])
    assert environment.is_done(told(http, environment.env_id))
    assert most_queued == 2 * 4 // 2
    assert delivered + most_queued * 2 // 4 > 5


def test_a_group_that_was_refused_is_a_4xx_which_is_not_sent_again(http: httpx.Client) -> None:
    start(http)
    register_environment(http)
    answers = [
        http.post("/scored_data", json=group(1, env_id=0, scores=[1.0])),
        http.post("/scored_data", json=group(1, size=4, env_id=0)),
        http.post("/scored_data", json=group(1, size=3)),
        http.post("/scored_data", content=b"x", headers={"Content-Encoding": "gzip"}),
    ]
    assert {answer.status_code // 100 for answer in answers} == {4}


def test_a_trainer_drains_batches_until_null_and_indexes_every_key(http: httpx.Client) -> None:
    start(http)
    submit(http, *range(6))
    batches = []
    while (data := http.get("/batch").json())["batch"] is not None:
        batches.append(data["batch"])
    assert len(batches) == 3
    for item in (item for batch in batches for item in batch):
        assert item["overrides"] is None
        assert item["inference_logprobs"] is None
        assert item["advantages"] is None
        assert item["generation_params"] is None
        assert len(item["tokens"]) == len(item["masks"]) == len(item["scores"]) == 2
