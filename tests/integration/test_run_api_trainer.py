"""`/register`, `/info`, `/wandb_info`: a trainer announces its run."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.integration.run_api_calls import (
    REGISTRATION,
    group,
    next_batch,
    register,
    register_environment,
    send_raw,
    start,
    status,
    submit,
)


def test_registration_is_published(http: httpx.Client) -> None:
    answer = register(http, starting_step=3).json()
    assert answer.keys() == {"uuid"}
    assert 0 <= answer["uuid"] < 2**128
    assert http.get("/info").json() == {"batch_size": 4, "max_token_len": 128}
    assert http.get("/wandb_info").json() == {"group": "group", "project": "project"}
    assert status(http) == (3, 0)


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
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2**16 + 1}, "batch_size"),
        ({"batch_size": 4.5}, "batch_size"),
        ({"batch_size": None}, "batch_size"),
        ({"wandb_project": None}, "wandb_project"),
        ({"starting_step": -1}, "starting_step"),
    ],
)
def test_a_registration_that_no_run_can_go_by_is_refused(
    http: httpx.Client, changes: dict[str, Any], field: str
) -> None:
    answer = register(http, **changes)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", field]


@pytest.mark.parametrize("unset", [0, -1])
def test_what_a_trainer_may_leave_open(http: httpx.Client, unset: int) -> None:
    """Environments read 0 and -1 as: no limit, no checkpoints, bring your own number of steps."""
    start(http, max_token_len=unset, save_checkpoint_interval=unset, num_steps=unset)
    assert http.get("/info").json()["max_token_len"] == unset
    answer = register_environment(http)
    assert (answer["checkpoint_interval"], answer["num_steps"]) == (unset, unset)


def test_numbers_are_coerced_where_nothing_is_lost(http: httpx.Client) -> None:
    assert register(http, batch_size="4", max_token_len=128.0).status_code == 200
    assert http.get("/info").json() == {"batch_size": 4, "max_token_len": 128}


def test_an_empty_project_is_published_as_such(http: httpx.Client) -> None:
    register(http, wandb_project="", wandb_group="")
    assert http.get("/wandb_info").json() == {"group": "", "project": ""}


def test_registering_again_keeps_queue_environments_and_step(http: httpx.Client) -> None:
    start(http)
    register_environment(http)
    submit(http, 1, 2, 3)
    assert next_batch(http) == [1, 2]
    assert next_batch(http) is None
    first, second = (register(http, starting_step=50).json()["uuid"] for _ in range(2))
    assert first != second
    assert status(http) == (1, 1)
    assert len(http.get("/environments").json()) == 1


def test_registering_again_applies_what_changed(http: httpx.Client) -> None:
    start(http)
    register(http, max_token_len=256, wandb_group="other", checkpoint_dir="elsewhere")
    assert http.get("/info").json() == {"batch_size": 4, "max_token_len": 256}
    assert http.get("/wandb_info").json()["group"] == "other"
    assert register_environment(http)["checkpoint_dir"] == "elsewhere"


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
    assert "batches of 4 sequences that are not acknowledged yet: 1" in refused.json()["detail"]
    assert next_batch(http) is None
    refused = register(http, batch_size=5)
    assert refused.status_code == 409
    assert "environment 0 sends groups of 2" in refused.json()["detail"]
    assert register(http, batch_size=8).status_code == 200


def test_sizes_that_need_each_other_suit_a_batch_together(http: httpx.Client) -> None:
    start(http, batch_size=24)
    register_environment(http, group_size=8)
    register_environment(http, group_size=12)
    assert register(http, batch_size=40).status_code == 200
    assert register(http, batch_size=30).status_code == 409


def test_data_before_registration_is_refused_and_harmless(http: httpx.Client) -> None:
    assert send_raw(http, group(1)).status_code == 409
    assert send_raw(http, [group(1)], "/scored_data_list").status_code == 409
    start(http)
    submit(http, 2, 3)
    assert next_batch(http) == [2, 3]
