"""`/batch?trainer=U&after=N` and `/batch/{id}/ack`, over HTTP. On the store: `test_run_store`."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import redis

from grpo_core.redis_names import served_weights_key
from grpo_core.run_api_client import TrainerClient
from grpo_core.wire import PolicyVersion, Registration, ScoredGroup
from tests.integration.run_api_calls import (
    REGISTRATION,
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


@pytest.fixture
def trainer(http: httpx.Client) -> int:
    """A registered trainer's id, with batches of two groups."""
    uuid: int = register(http).json()["uuid"]
    return uuid


def lease(
    http: httpx.Client, trainer: int, after: int = 0, wait_s: float = 0.0, **more: int
) -> httpx.Response:
    asked = {"trainer": trainer, "after": after, "wait_s": wait_s, **more}
    return http.get("/batch", params=asked)


def acknowledge(http: httpx.Client, trainer: int, batch_id: int) -> httpx.Response:
    return http.post(f"/batch/{batch_id}/ack", params={"trainer": trainer})


def leased(answer: httpx.Response) -> tuple[int, list[int]]:
    """The batch's id and the markers of its groups."""
    found = answer.raise_for_status().json()
    return found["batch_id"], [item["tokens"][0][0] for item in found["batch"]]


def test_batches_are_numbered_and_asking_again_gives_the_same_bytes(
    http: httpx.Client, trainer: int
) -> None:
    submit(http, 1, 2, 3, 4)
    first = lease(http, trainer)
    assert leased(first) == (1, [1, 2])
    assert lease(http, trainer).content == first.content
    assert leased(lease(http, trainer, after=1)) == (2, [3, 4])
    assert lease(http, trainer, after=2).json() == {"batch": None}
    assert status(http) == (2, 0)
    assert lease(http, trainer).content == first.content


def test_registering_again_redelivers_byte_for_byte_what_is_not_acknowledged(
    http: httpx.Client, trainer: int
) -> None:
    submit(http, *range(6))
    answers = [lease(http, trainer, after) for after in range(3)]
    assert acknowledge(http, trainer, 1).json() == {
        "status": "success",
        "acknowledged": 1,
        "released": 1,
    }
    again = register(http).json()["uuid"]
    assert [lease(http, again, after).content for after in (0, 2)] == [
        answer.content for answer in answers[1:]
    ]
    assert lease(http, trainer, after=2).status_code == 409
    assert acknowledge(http, trainer, 3).status_code == 409
    assert acknowledge(http, again, 3).json()["released"] == 2
    assert lease(http, again).json() == {"batch": None}


def test_environments_are_told_where_the_run_ends_for_this_trainer(
    http: httpx.Client, trainer: int
) -> None:
    """Counted like steps, whichever batches it takes a step on or is handed again."""
    submit(http, *range(4))
    lease(http, trainer, after=0, batches_left=3)
    register_environment(http)
    assert (status(http)[0], told(http, 0)["num_steps"]) == (1, 3)
    lease(http, trainer, after=1, batches_left=3)  # it took no step on the first
    assert (status(http)[0], told(http, 0)["num_steps"]) == (2, 4)
    assert acknowledge(http, trainer, 1).is_success

    again = register(http, num_steps=1).json()["uuid"]
    assert told(http, 0)["num_steps"] == 4  # until the new one has said
    lease(http, again, after=0, batches_left=3)  # the second, again
    assert (status(http)[0], told(http, 0)["num_steps"]) == (2, 4)
    lease(http, again, after=2, batches_left=0)
    assert told(http, 0)["num_steps"] == 2
    lease(http, trainer, after=2, batches_left=9)  # superseded
    assert told(http, 0)["num_steps"] == 2
    lease(http, again, after=2)
    assert told(http, 0)["num_steps"] is None


def test_without_gzip_a_batch_is_the_same(http: httpx.Client, trainer: int) -> None:
    large = group(1, tokens=[[7] * 60_000] * 2, masks=[[7] * 60_000] * 2)
    http.post("/scored_data", content=gzip.compress(json.dumps(large).encode()),
              headers={"content-encoding": "gzip"}).raise_for_status()  # fmt: skip
    send(http, 2)
    encoded = lease(http, trainer)
    assert encoded.headers["content-encoding"] == "gzip"
    plain = http.get("/batch", params={"trainer": trainer}, headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.headers["vary"] == encoded.headers["vary"] == "Accept-Encoding"
    assert plain.content == encoded.content
    assert plain.json()["batch"][0]["tokens"] == large["tokens"]


@pytest.fixture
def serve(redis_url: str) -> Iterator[Callable[[int, int], None]]:
    """Say, in vllm-server's place, which version it serves."""
    with redis.Redis.from_url(redis_url) as connection:
        key = served_weights_key("tests")
        yield lambda epoch, step: connection.hset(key, mapping={"epoch": epoch, "step": step})
        connection.delete(key)


def test_a_lease_says_under_which_version_each_group_was_received(
    http: httpx.Client, trainer: int, serve: Callable[[int, int], None]
) -> None:
    submit(http, 1)
    serve(3, 17)
    submit(http, 2)
    first = lease(http, trainer)
    assert list(first.json()) == ["batch_id", "received_under", "batch"]
    assert first.json()["received_under"] == [None, [3, 17]]
    serve(3, 18)
    again = register(http).json()["uuid"]
    assert lease(http, again).content == first.content


def test_a_plain_poll_is_answered_as_ever(
    http: httpx.Client, serve: Callable[[int, int], None]
) -> None:
    serve(3, 17)
    start(http)
    submit(http, 1, 2)
    answer = http.get("/batch").json()
    assert list(answer) == ["batch"]
    assert [sorted(served) for served in answer["batch"]] == [sorted(ScoredGroup.model_fields)] * 2


def test_the_client_reads_it(
    http: httpx.Client, run_api_url: str, serve: Callable[[int, int], None]
) -> None:
    with TrainerClient(run_api_url) as client:
        client.register(Registration.model_validate(REGISTRATION))
        submit(http, 1)
        serve(3, 17)
        submit(http, 2)
        batch = client.next_batch(deadline_s=5.0)
    assert batch.received_under == [None, PolicyVersion(3, 17)]
    assert [group.tokens[0][0] for group in batch.groups] == [1, 2]


def test_asking_is_what_starts_the_run(http: httpx.Client, trainer: int) -> None:
    assert register_environment(http)["status"] == "wait for trainer to start"
    lease(http, trainer)
    assert register_environment(http)["status"] == "success"


def test_a_plain_poll_takes_nothing_from_a_trainer_with_leases(
    http: httpx.Client, trainer: int
) -> None:
    submit(http, 1, 2, 3, 4)
    lease(http, trainer)
    refused = http.get("/batch")
    assert refused.status_code == 409
    assert "by lease" in refused.json()["detail"]
    assert status(http) == (1, 2)


@pytest.mark.parametrize(
    ("asked", "status_code"),
    [
        ({"trainer": "x"}, 422),
        ({"trainer": -1}, 422),
        ({"trainer": 2**128}, 422),
        ({"trainer": 2**128 - 1}, 409),
        ({"trainer": "own", "after": -1}, 422),
        ({"trainer": "own", "after": 1}, 409),
        ({"trainer": "own", "after": 10**400}, 422),
        ({"trainer": "own", "wait_s": -1}, 422),
        ({"trainer": "own", "wait_s": 61}, 422),
        ({"trainer": "own", "wait_s": "nan"}, 422),
    ],
)
def test_what_cannot_be_asked_for(
    http: httpx.Client, trainer: int, asked: dict[str, Any], status_code: int
) -> None:
    submit(http, 1, 2)
    asked = asked | ({"trainer": trainer} if asked["trainer"] == "own" else {})
    assert http.get("/batch", params=asked).status_code == status_code
    assert status(http) == (0, 2)


@pytest.mark.parametrize(
    ("path", "status_code"),
    [
        ("/batch/1/ack", 422),
        ("/batch/0/ack?trainer={own}", 422),
        ("/batch/-1/ack?trainer={own}", 422),
        ("/batch/x/ack?trainer={own}", 422),
        ("/batch/2/ack?trainer={own}", 404),
        ("/batch/1/ack?trainer=5", 409),
    ],
)
def test_what_cannot_be_acknowledged(
    http: httpx.Client, trainer: int, path: str, status_code: int
) -> None:
    submit(http, 1, 2)
    first = lease(http, trainer).content
    assert http.post(path.format(own=trainer)).status_code == status_code
    assert lease(http, trainer).content == first


def test_nobody_has_registered(http: httpx.Client) -> None:
    assert lease(http, 5).json()["status"] == "error"
    refused = acknowledge(http, 5, 1)
    assert refused.status_code == 409
    assert "not registered" in refused.json()["detail"]


def test_a_long_poll_ends_with_the_groups_that_complete_the_batch(
    http: httpx.Client, trainer: int, run_api_url: str
) -> None:
    send(http, 1)

    def complete_it() -> None:
        time.sleep(0.3)
        httpx.post(f"{run_api_url}/scored_data", json=group(2)).raise_for_status()

    completing = threading.Thread(target=complete_it)
    completing.start()
    assert leased(lease(http, trainer, wait_s=20.0)) == (1, [1, 2])
    completing.join()


def test_a_long_poll_without_data_ends_in_time(http: httpx.Client, trainer: int) -> None:
    assert lease(http, trainer, wait_s=0.2).json() == {"batch": None}


def test_plain_polls_go_on_after_another_registration(http: httpx.Client) -> None:
    start(http)
    submit(http, 1, 2, 3, 4)
    assert next_batch(http) == [1, 2]
    trainer = register(http).json()["uuid"]
    assert leased(lease(http, trainer)) == (1, [1, 2])
    register(http)
    assert [next_batch(http), next_batch(http), next_batch(http)] == [[1, 2], [3, 4], None]
