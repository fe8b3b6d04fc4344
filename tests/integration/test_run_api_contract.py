"""The wire contract, endpoint by endpoint, over HTTP to a real process on a real Redis."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.integration.run_api_calls import (
    ENVIRONMENT,
    REGISTRATION,
    group,
    next_batch,
    register,
    register_environment,
    start,
    status,
    status_env,
    submit,
)

ALL_KEYS = {
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages"),
    *("generation_params", "inference_logprobs", "overrides", "group_overrides", "images"),
    *("env_id", "distill_token_ids", "distill_logprobs"),
}


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/", {"message": "AtroposLib API"}),
        ("/health", {"status": "ok"}),
        ("/status", {"current_step": 0, "queue_size": 0}),
        ("/info", {"batch_size": -1, "max_token_len": -1}),
        ("/wandb_info", {"group": None, "project": None}),
        ("/environments", []),
        (
            "/batch",
            {
                "status": "error",
                "message": "Trainer not registered. Call /register first.",
                "batch": [],
            },
        ),
        (
            "/latest_example",
            {
                name: []
                for name in (
                    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "images"),
                    *("generation_params", "inference_logprobs", "messages"),
                )
            },
        ),
    ],
)
def test_before_a_trainer_registers(http: httpx.Client, path: str, answer: Any) -> None:
    response = http.get(path)
    assert response.status_code == 200
    assert response.json() == answer


def test_registration_is_published(http: httpx.Client) -> None:
    first = register(http, starting_step=3).json()
    assert 0 <= first["uuid"] < 2**128
    assert http.get("/info").json() == {"batch_size": 4, "max_token_len": 128}
    assert http.get("/wandb_info").json() == {"group": "group", "project": "project"}
    assert status(http) == (3, 0)


def test_environments_wait_until_the_trainer_polls(http: httpx.Client) -> None:
    waiting = {"status": "wait for trainer to start"}
    assert register_environment(http) == waiting
    register(http, starting_step=3)
    assert register_environment(http) == waiting
    http.get("/batch")
    assert register_environment(http) == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "math_0",
        "checkpoint_dir": "checkpoints",
        "starting_step": 3,
        "checkpoint_interval": 5,
        "num_steps": 100,
    }
    assert register_environment(http)["wandb_name"] == "math_1"
    other = register_environment(http, desired_name="code")
    assert (other["env_id"], other["wandb_name"]) == (2, "code_0")


def test_disconnected_environment_stays_known(http: httpx.Client) -> None:
    start(http)
    register_environment(http)
    assert http.post("/disconnect-env", json={"env_id": 0}).json() == {"status": "success"}
    assert http.get("/environments").json() == [
        {"env_id": 0, "name": "math_0", "connected": False, "group_size": 2}
    ]
    assert status_env(http, 0).json()["env_weight"] == 0.01
    failure = http.post("/disconnect-env", json={"env_id": 9})
    assert failure.status_code == 200
    assert failure.json()["status"] == "failure"
    assert "env_id 9" in failure.json()["error"]


def test_batches_are_exact_and_oldest_first(http: httpx.Client) -> None:
    start(http)
    submit(http, 1, 2, 3)
    assert status(http) == (0, 3)
    assert next_batch(http) == [1, 2]
    assert status(http) == (1, 1)
    assert next_batch(http) is None
    submit(http, 4)
    assert next_batch(http) == [3, 4]
    assert status(http) == (2, 0)


def test_groups_of_one_batch_may_differ_in_size(http: httpx.Client) -> None:
    start(http)
    submit(http, 1, size=2)
    submit(http, 2, size=4)
    assert next_batch(http) == [2]
    submit(http, 3, 4, size=1)
    assert next_batch(http) == [1, 3, 4]


def test_served_groups_carry_every_key_and_what_was_sent(http: httpx.Client) -> None:
    start(http)
    rich = group(
        1,
        size=4,
        inference_logprobs=[[1.0, 1.0, -0.1 - i / 3] for i in range(4)],
        messages=[[{"role": "user", "content": "naïve ☃", "reward": 0.5}]] * 4,
        overrides=[{}, {"a": 1}, {}, {}],
        group_overrides={"policy_version": [[[0, 1], [0, 2]]] * 4},
        env_id=7,
        surprise="dropped",
    )
    http.post("/scored_data", json=rich).raise_for_status()
    (served,) = http.get("/batch").json()["batch"]
    assert set(served) == ALL_KEYS
    assert {name: value for name, value in served.items() if value is not None} == {
        name: value for name, value in rich.items() if name != "surprise"
    }
    assert http.get("/latest_example").json() == served


def test_latest_example_outlives_its_batch(http: httpx.Client) -> None:
    start(http)
    submit(http, 1, 2)
    assert next_batch(http) == [1, 2]
    assert next_batch(http) is None
    assert http.get("/latest_example").json()["tokens"][0][0] == 2
    submit(http, 3)
    assert http.get("/latest_example").json()["tokens"][0][0] == 3


def test_list_is_queued_in_order(http: httpx.Client) -> None:
    start(http)
    answer = http.post("/scored_data_list", json=[group(1), group(2)]).json()
    assert answer == {"status": "received", "groups_processed": 2}
    assert http.post("/scored_data_list", json=[]).json()["groups_processed"] == 0
    assert next_batch(http) == [1, 2]


def test_status_of_an_environment(http: httpx.Client) -> None:
    start(http, batch_size=8)
    register_environment(http, min_batch_allocation=0.25)
    register_environment(http, weight=3.0, min_batch_allocation=0.25)
    submit(http, 1, 2, env_id=0)
    submit(http, 3, 4, 5, env_id=1)
    assert status_env(http, 0).json() == {
        "current_step": 0,
        "queue_size": 4,  # 4 of its own, and 6 of the other less its minimum of 2, in pairs
        "unallocated_fraction": 0.5,
        "self_queue_size": 2,
        "max_group_size": 2,
        "env_weight": 0.25,
    }
    assert next_batch(http) == [1, 2, 3, 4]
    left = status_env(http, 1).json()
    assert (left["current_step"], left["self_queue_size"], left["queue_size"]) == (1, 1, 1)


def test_status_env_is_a_get_with_a_body(http: httpx.Client) -> None:
    start(http)
    register_environment(http)
    assert http.post("/status-env", json={"env_id": 0}).status_code == 405
    assert http.get("/status-env").status_code == 422
    assert http.get("/status-env", params={"env_id": 0}).status_code == 422
    unknown = status_env(http, 1)
    assert unknown.status_code == 404
    assert "env_id 1" in unknown.json()["detail"]
    assert status_env(http, -1).status_code == 422


def test_registering_again_keeps_the_run(http: httpx.Client) -> None:
    start(http)
    register_environment(http)
    submit(http, 1, 2, 3)
    assert next_batch(http) == [1, 2]
    assert next_batch(http) is None
    first, second = (register(http, starting_step=50).json()["uuid"] for _ in range(2))
    assert first != second
    assert status(http) == (1, 1)
    assert len(http.get("/environments").json()) == 1


def test_trainer_that_registers_again_gets_its_batch_again(http: httpx.Client) -> None:
    start(http)
    submit(http, 1, 2, 3, 4)
    handed_out = http.get("/batch").content
    assert status(http) == (1, 2)
    register(http)
    assert http.get("/batch").content == handed_out
    assert status(http) == (1, 2)
    assert next_batch(http) == [3, 4]
    assert status(http) == (2, 0)


def test_an_acknowledged_batch_is_not_handed_out_again(http: httpx.Client) -> None:
    start(http)
    submit(http, 1, 2)
    assert next_batch(http) == [1, 2]
    assert next_batch(http) is None
    register(http)
    assert next_batch(http) is None


@pytest.mark.parametrize(
    ("batch_size", "expected", "says"),
    [(4, 200, ""), (8, 200, ""), (6, 200, ""), (3, 409, "groups of 2"), (5, 409, "differs")],
)
def test_another_batch_size_must_suit_what_is_queued(
    http: httpx.Client, batch_size: int, expected: int, says: str
) -> None:
    start(http)
    submit(http, 1)
    answer = register(http, batch_size=batch_size, max_token_len=256)
    assert answer.status_code == expected
    assert says in answer.text
    current = {"batch_size": batch_size, "max_token_len": 256}
    old = {"batch_size": 4, "max_token_len": 128}
    assert http.get("/info").json() == (current if expected == 200 else old)


def test_another_batch_size_must_suit_the_batch_and_the_environments(http: httpx.Client) -> None:
    start(http)
    register_environment(http)
    submit(http, 1, 2)
    assert next_batch(http) == [1, 2]
    refused = register(http, batch_size=8)
    assert refused.status_code == 409
    assert "a batch of 4 sequences is not acknowledged" in refused.json()["detail"]
    assert next_batch(http) is None
    refused = register(http, batch_size=5)
    assert refused.status_code == 409
    assert "environment 0 sends groups of 2" in refused.json()["detail"]
    assert register(http, batch_size=8).status_code == 200


def test_data_before_registration_is_refused_and_harmless(http: httpx.Client) -> None:
    assert http.post("/scored_data", json=group(1)).status_code == 409
    assert http.post("/scored_data_list", json=[group(1)]).status_code == 409
    start(http)
    submit(http, 2, 3)
    assert next_batch(http) == [2, 3]


def test_reset_forgets_everything(http: httpx.Client) -> None:
    start(http)
    register_environment(http)
    submit(http, 1, 2, 3)
    assert next_batch(http) == [1, 2]
    answer = http.get("/reset_data")
    assert answer.text == "Reset successful"
    assert answer.headers["content-type"].startswith("text/plain")
    assert status(http) == (0, 0)
    assert http.get("/info").json()["batch_size"] == -1
    assert http.get("/environments").json() == []
    assert http.get("/latest_example").json()["tokens"] == []
    assert http.get("/batch").json()["status"] == "error"
    register(http)
    assert register_environment(http) == {"status": "wait for trainer to start"}
    assert next_batch(http) is None
    assert register_environment(http)["env_id"] == 0


@pytest.mark.parametrize("field", list(REGISTRATION))
def test_every_field_of_a_registration_is_required(http: httpx.Client, field: str) -> None:
    partial = {name: value for name, value in REGISTRATION.items() if name != field}
    answer = http.post("/register", json=partial)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", field]
    assert http.get("/info").json()["batch_size"] == -1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"desired_name": None}, "desired_name"),
        ({"weight": -1.0}, "weight"),
        ({"min_batch_allocation": 1.5}, "min_batch_allocation"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": 3}, "group_size"),
        ({"group_size": 8}, "group_size"),
    ],
)
def test_environment_that_cannot_be_served_is_refused(
    http: httpx.Client, changes: dict[str, Any], field: str
) -> None:
    start(http)
    answer = http.post("/register-env", json=ENVIRONMENT | changes)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", field]
    assert http.get("/environments").json() == []
