"""`/register`, `/info`, `/wandb_info`: a trainer announces its run."""

from __future__ import annotations

import httpx
import pytest

from tests.integration.run_api_calls import (
    REGISTRATION,
    group,
    next_batch,
    refused_field,
    register,
    register_environment,
    send_raw,
    start,
    status,
    submit,
)


def test_a_registration_is_published(http: httpx.Client) -> None:
    answer = register(http, starting_step=3, batch_size="4", max_token_len=128.0).json()
    assert answer.keys() == {"uuid"}
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


@pytest.mark.parametrize("unset", [0, -1])
def test_what_a_trainer_may_leave_open(http: httpx.Client, unset: int) -> None:
    """Environments read 0 and -1 as: no limit, no checkpoints, bring your own number of steps."""
    start(http, max_token_len=unset, save_checkpoint_interval=unset, num_steps=unset)
    assert http.get("/info").json()["max_token_len"] == unset
    answer = register_environment(http)
    assert (answer["checkpoint_interval"], answer["num_steps"]) == (unset, unset)


def test_registering_again_keeps_the_run_and_applies_what_changed(http: httpx.Client) -> None:
    first = register(http).json()["uuid"]
    assert next_batch(http) is None
    register_environment(http)
    submit(http, 1, 2, 3)
    assert [next_batch(http), next_batch(http)] == [[1, 2], None]
    changed = {"max_token_len": 256, "wandb_group": "", "checkpoint_dir": "elsewhere"}
    assert register(http, starting_step=50, **changed).json()["uuid"] != first
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


def test_another_batch_size_must_suit_batches_queue_and_environments(http: httpx.Client) -> None:
    start(http)
    register_environment(http)
    submit(http, 1, 2)
    assert next_batch(http) == [1, 2]

    def refusal(batch_size: int) -> str:
        answer = register(http, batch_size=batch_size, max_token_len=256)
        assert answer.status_code == 409
        assert http.get("/info").json() == {"batch_size": 4, "max_token_len": 128}
        return str(answer.json()["detail"])

    assert "batches of 4 sequences that are not acknowledged yet: 1" in refusal(8)
    assert next_batch(http) is None
    submit(http, 3, size=4)
    conflicts = refusal(5)
    assert "environment 0 sends groups of 2" in conflicts
    assert "groups of 4 sequences are queued" in conflicts
    assert register(http, batch_size=8, max_token_len=256).status_code == 200
    assert http.get("/info").json() == {"batch_size": 8, "max_token_len": 256}


def test_data_before_registration_is_refused_and_harmless(http: httpx.Client) -> None:
    assert send_raw(http, group(1)).status_code == 409
    assert send_raw(http, [group(1)], "/scored_data_list").status_code == 409
    start(http)
    submit(http, 2, 3)
    assert next_batch(http) == [2, 3]
