"""The trainer registers, leases and acknowledges; `/reset_data` ends its run.

`test_run_store` tests leases on the store, `test_run_api_bad_input` invalid requests.
"""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from grpo_core.protocol import PROTOCOL_HEADER
from grpo_core.redis.keys import served_weights_key
from grpo_core.wire.run_api import RUN_UUID_HEADER
from tests.fixtures.run_api import RUN_ID, start_run_api
from tests.integration.run_api_calls import WAITING, ApiClient, group, leased
from tests.support.wait import DEADLINE_S, wait_for

EXAMPLE_KEYS = (
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params"),
    *("inference_logprobs", "messages", "images"),
)
NO_TRAINER = "Trainer not registered. Call /register first."
BEFORE_A_TRAINER = {
    "/": {"message": "AtroposLib API"},
    "/health": {"status": "ok"},
    "/status": {
        "current_step": 0,
        "queue_size": 0,
        "run_uuid": None,
        "last_batch": 0,
        "refused_groups": 0,
        "last_refusal": "",
        "lost_groups": 0,
    },
    "/info": {"batch_size": -1, "max_token_len": -1},
    "/wandb_info": {"group": None, "project": None},
    "/environments": [],
    "/batch": {"status": "error", "message": NO_TRAINER, "batch": []},
    "/latest_example": {name: [] for name in EXAMPLE_KEYS},
}


def test_every_answer_names_protocol_and_release(http: ApiClient) -> None:
    for path in ("/status", "/batch", "/nowhere"):
        assert http.get(path).headers.get_list(PROTOCOL_HEADER[0]) == [PROTOCOL_HEADER[1]], path


def test_registering_again_keeps_the_run_and_applies_what_changed(http: ApiClient) -> None:
    first = http.register(batch_size="4", max_token_len=128.0).json()
    assert 0 <= first["uuid"] < 2**128
    assert http.get("/info").json() == {"batch_size": 4, "max_token_len": 128}
    assert http.next_batch() is None
    http.register_environment()
    http.submit(1, 2, 3)
    assert [http.next_batch(), http.next_batch()] == [[1, 2], None]
    changed = {"max_token_len": 256, "wandb_group": "", "checkpoint_dir": "elsewhere"}
    again = http.register(starting_step=50, **changed).json()
    assert again["uuid"] != first["uuid"]
    assert again["run_uuid"] == first["run_uuid"] == http.get("/status").json()["run_uuid"]
    assert http.status() == (1, 1)
    assert len(http.get("/environments").json()) == 1
    assert http.get("/info").json() == {"batch_size": 4, "max_token_len": 256}
    assert http.get("/wandb_info").json() == {"group": "", "project": "project"}
    assert http.register_environment()["checkpoint_dir"] == "elsewhere"


def test_another_batch_size_must_suit_queue_and_environments(http: ApiClient) -> None:
    http.start()
    http.register_environment()
    http.submit(3, size=4)
    answer = http.register(batch_size=5, max_token_len=256)
    assert answer.status_code == 409
    assert "environment 0 sends groups of 2" in answer.json()["detail"]
    assert http.get("/info").json() == {"batch_size": 4, "max_token_len": 128}
    assert http.register(batch_size=8, max_token_len=256).status_code == 200
    assert http.get("/info").json() == {"batch_size": 8, "max_token_len": 256}


def test_a_reset_forgets_everything_and_a_run_begins_anew(http: ApiClient) -> None:
    http.start(starting_step=7)
    http.register_environment()
    http.submit(1, 2, 3)
    http.send_group(4, size=1, env_id=0)
    assert http.next_batch() == [1, 2]
    assert http.get("/reset_data").text == "Reset successful"
    for path, expected in BEFORE_A_TRAINER.items():
        answer = http.probe(path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        assert answer.json() == expected, path

    http.register()
    assert http.register_environment() == WAITING
    assert http.next_batch() is None
    again = http.register_environment()
    # an id is never used again, so an environment of the former run is unknown
    assert (again["env_id"], again["wandb_name"]) == (1, "math_0")
    assert http.status_env(0).status_code == 404
    assert http.send_group(2, size=1, env_id=1) == {"status": "buffered", "buffer_size": 1}


@pytest.mark.parametrize("size", [2, 1])
def test_groups_of_the_run_before_a_reset_are_refused(http: ApiClient, size: int) -> None:
    runs = []
    for _ in range(2):
        http.get("/reset_data")
        http.start()
        runs.append(http.register_environment())
    former, new = (environment["run_uuid"] for environment in runs)
    one = group(1, size=size, env_id=runs[1]["env_id"])

    def sent(path: str, body: Any, run_uuid: str) -> httpx.Response:
        return http.post(path, json=body, headers={RUN_UUID_HEADER: run_uuid})

    for path, body in (("/scored_data", one), ("/scored_data_list", [one])):
        refused = sent(path, body, former)
        assert (refused.status_code, "another run" in refused.text) == (409, True)
        assert http.get("/status").json()["queue_size"] == 0
    assert sent("/scored_data", one, new).status_code == 200


@pytest.fixture
def trainer(http: ApiClient) -> int:
    """The id of a registered trainer with batches of two groups."""
    uuid: int = http.register().json()["uuid"]
    return uuid


def test_registering_again_redelivers_byte_for_byte_what_is_not_acknowledged(
    http: ApiClient, trainer: int, redis_url: str
) -> None:
    """With the version that was served when each group arrived."""
    http.submit(*range(5))
    with redis.Redis.from_url(redis_url) as connection:
        connection.hset(served_weights_key(RUN_ID), mapping={"epoch": 3, "step": 17})
        http.submit(5)
        connection.delete(served_weights_key(RUN_ID))
    assert leased(http.lease(trainer)) == (1, [0, 1])
    answers = [http.lease(trainer, after).content for after in range(3)]
    assert json.loads(answers[2])["received_under"] == [None, [3, 17]]
    done = http.acknowledge(trainer, 1).json()
    assert done == {"status": "success", "acknowledged": 1, "released": 1}
    again = http.register().json()["uuid"]
    assert [http.lease(again, after).content for after in (0, 2)] == answers[1:]
    assert http.lease(trainer, after=2).status_code == 409
    assert http.acknowledge(trainer, 3).status_code == 409
    assert http.acknowledge(again, 3).json()["released"] == 2
    assert http.lease(again).json()["batch"] is None


def test_environments_are_told_where_the_run_ends_for_this_trainer(
    http: ApiClient, trainer: int
) -> None:
    """Batches count like steps, even if some are skipped or handed out again."""
    http.submit(*range(4))
    http.lease(trainer, batches_left=3)
    assert http.run_facts()["num_steps"] == 3
    http.register_environment()

    def step_and_end() -> tuple[int, int | None]:
        return http.status()[0], http.told(0)["num_steps"]

    assert step_and_end() == (1, 3)
    http.lease(trainer, after=1, batches_left=3)  # the trainer took no step on the first batch
    assert step_and_end() == (2, 4)
    assert http.acknowledge(trainer, 1).is_success

    again = http.register(num_steps=1).json()["uuid"]
    http.lease(again, batches_left=3)  # the second batch, again
    assert step_and_end() == (2, 4)
    http.lease(again, after=2, batches_left=0)
    assert step_and_end() == (2, 2)


def test_a_long_poll_starts_the_run_and_ends_with_the_groups_that_complete_the_batch(
    http: ApiClient, trainer: int
) -> None:
    http.send_group(1)
    assert http.register_environment() == WAITING
    held = HTTPConnection(http.base_url.host, http.base_url.port, timeout=DEADLINE_S)
    held.request("GET", f"/batch?trainer={trainer}&wait_s=60")
    # environments can register after the trainer's first poll
    wait_for(lambda: http.register_environment()["status"], lambda answer: answer == "success")
    http.send_group(2)
    answer = json.load(held.getresponse())
    assert [item["tokens"][0][0] for item in answer["batch"]] == [1, 2]
    held.close()


@pytest.mark.parametrize("ending", ["client leaves", "server is killed"])
def test_an_answer_that_was_cut_off_is_given_again_and_no_sooner(
    http: ApiClient, redis_url: str, tmp_path: Path, ending: str
) -> None:
    http.register()
    http.submit(0, 1, images="more than sockets hold" * 150_000)
    http.submit(2, 3)
    replica = start_run_api(redis_url, tmp_path)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((httpx.URL(replica.url).host, httpx.URL(replica.url).port))
        client.sendall(b"GET /batch HTTP/1.1\r\nHost: run-api\r\n\r\n")
        assert client.recv(4) == b"HTTP"
        assert [http.next_batch() for _ in range(2)] == [[2, 3], None]
        if ending == "client leaves":
            client.close()
        else:
            replica.process.kill()
        assert wait_for(lambda: http.next_batch()) == [0, 1]
    replica.process.stop()
