"""The answers of all routes before and after a registration, and after `/reset_data`."""

from __future__ import annotations

import httpx
import pytest

from grpo_core.wire.run_api import RUN_UUID_HEADER
from tests.integration.run_api_calls import (
    REGISTRATION,
    WAITING,
    group,
    next_batch,
    probe,
    refused_field,
    register,
    register_environment,
    send,
    send_raw,
    start,
    status,
    status_env,
    submit,
)

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
        "refused_groups": 0,
        "last_refusal": "",
    },
    "/info": {"batch_size": -1, "max_token_len": -1},
    "/wandb_info": {"group": None, "project": None},
    "/environments": [],
    "/batch": {"status": "error", "message": NO_TRAINER, "batch": []},
    "/latest_example": {name: [] for name in EXAMPLE_KEYS},
}


def test_a_registration_is_published(http: httpx.Client) -> None:
    answer = register(http, starting_step=3, batch_size="4", max_token_len=128.0).json()
    assert answer.keys() == {"uuid", "run_uuid"}
    assert 0 <= answer["uuid"] < 2**128
    assert http.get("/info").json() == {"batch_size": 4, "max_token_len": 128}
    assert http.get("/wandb_info").json() == {"group": "group", "project": "project"}
    assert status(http) == (3, 0)


def test_a_registration_that_no_run_can_go_by_is_refused_by_field(http: httpx.Client) -> None:
    for field in REGISTRATION:
        partial = {name: value for name, value in REGISTRATION.items() if name != field}
        assert refused_field(http.post("/register", json=partial)) == field
    for field, value in (("batch_size", 2**16 + 1), ("batch_size", 4.5), ("starting_step", -1)):
        assert refused_field(register(http, **{field: value})) == field
    assert http.get("/info").json()["batch_size"] == -1


def test_registering_again_keeps_the_run_and_applies_what_changed(http: httpx.Client) -> None:
    first = register(http).json()
    assert next_batch(http) is None
    register_environment(http)
    submit(http, 1, 2, 3)
    assert [next_batch(http), next_batch(http)] == [[1, 2], None]
    changed = {"max_token_len": 256, "wandb_group": "", "checkpoint_dir": "elsewhere"}
    again = register(http, starting_step=50, **changed).json()
    assert again["uuid"] != first["uuid"]
    assert again["run_uuid"] == first["run_uuid"] == http.get("/status").json()["run_uuid"]
    assert status(http) == (1, 1)
    assert len(http.get("/environments").json()) == 1
    assert http.get("/info").json() == {"batch_size": 4, "max_token_len": 256}
    assert http.get("/wandb_info").json() == {"group": "", "project": "project"}
    assert register_environment(http)["checkpoint_dir"] == "elsewhere"


def test_registering_again_hands_out_what_was_not_acknowledged_and_nothing_else(
    http: httpx.Client,
) -> None:
    start(http)
    submit(http, 1, 2, 3, 4)
    handed_out = http.get("/batch").content
    register(http)
    assert http.get("/batch").content == handed_out
    assert status(http) == (1, 2)
    assert [next_batch(http), next_batch(http)] == [[3, 4], None]
    register(http)
    assert next_batch(http) is None
    assert status(http) == (2, 0)


def test_another_batch_size_must_suit_queue_and_environments(http: httpx.Client) -> None:
    start(http)
    register_environment(http)
    submit(http, 3, size=4)
    answer = register(http, batch_size=5, max_token_len=256)
    assert answer.status_code == 409
    assert "environment 0 sends groups of 2" in answer.json()["detail"]
    assert http.get("/info").json() == {"batch_size": 4, "max_token_len": 128}
    assert register(http, batch_size=8, max_token_len=256).status_code == 200
    assert http.get("/info").json() == {"batch_size": 8, "max_token_len": 256}


def test_data_before_registration_is_refused_and_harmless(http: httpx.Client) -> None:
    assert send_raw(http, group(1)).status_code == 409
    assert send_raw(http, [group(1)], "/scored_data_list").status_code == 409
    start(http)
    submit(http, 2, 3)
    assert next_batch(http) == [2, 3]


def test_a_reset_forgets_everything_and_a_run_begins_anew(http: httpx.Client) -> None:
    start(http, starting_step=7)
    register_environment(http)
    submit(http, 1, 2, 3)
    send(http, 4, size=1, env_id=0)
    assert next_batch(http) == [1, 2]
    assert http.get("/reset_data").text == "Reset successful"
    for path, expected in BEFORE_A_TRAINER.items():
        answer = probe(http, path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        assert answer.json() == expected, path

    register(http)
    assert register_environment(http) == WAITING
    assert next_batch(http) is None
    again = register_environment(http)
    # an id is never used again, so an environment of the former run is unknown
    assert (again["env_id"], again["wandb_name"]) == (1, "math_0")
    assert status_env(http, 0).status_code == 404
    assert send(http, 2, size=1, env_id=1) == {"status": "buffered", "buffer_size": 1}


@pytest.mark.parametrize("route", ["/scored_data", "/scored_data_list"])
@pytest.mark.parametrize("size", [2, 1])
def test_groups_of_the_run_before_a_reset_are_refused(
    http: httpx.Client, route: str, size: int
) -> None:
    start(http)
    former = register_environment(http)
    http.get("/reset_data")
    start(http)
    new = register_environment(http)
    one = group(1, size=size) | {"env_id": new["env_id"]}
    body = [one] if route.endswith("list") else one

    def sent(run_uuid: str) -> httpx.Response:
        return http.post(route, json=body, headers={RUN_UUID_HEADER: run_uuid})

    refused = sent(former["run_uuid"])
    assert refused.status_code == 409
    assert "another run" in refused.text
    assert http.get("/status").json()["queue_size"] == 0
    assert sent(new["run_uuid"]).status_code == 200
