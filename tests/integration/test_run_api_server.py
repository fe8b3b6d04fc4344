"""`/`, `/health`, `/status`, `/reset_data`, and every question before a trainer registers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.integration.run_api_calls import (
    WAITING,
    next_batch,
    probe,
    register,
    register_environment,
    send,
    start,
    status,
    submit,
)

EXAMPLE_KEYS = (
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params"),
    *("inference_logprobs", "messages", "images"),
)
NOT_REGISTERED = {
    "status": "error",
    "message": "Trainer not registered. Call /register first.",
    "batch": [],
}
BEFORE_A_TRAINER = [
    ("/", {"message": "AtroposLib API"}),
    ("/health", {"status": "ok"}),
    ("/status", {"current_step": 0, "queue_size": 0}),
    ("/info", {"batch_size": -1, "max_token_len": -1}),
    ("/wandb_info", {"group": None, "project": None}),
    ("/environments", []),
    ("/batch", NOT_REGISTERED),
    ("/latest_example", {name: [] for name in EXAMPLE_KEYS}),
]


@pytest.mark.parametrize(("path", "answer"), BEFORE_A_TRAINER, ids=[p for p, _ in BEFORE_A_TRAINER])
def test_before_a_trainer_registers(http: httpx.Client, path: str, answer: Any) -> None:
    response = probe(http, path)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.json() == answer


def test_status_counts_groups_neither_parts_nor_the_batch_handed_out(http: httpx.Client) -> None:
    start(http, starting_step=3)
    register_environment(http)
    submit(http, 1, 2, 3)
    assert status(http) == (3, 3)
    send(http, 4, size=1, env_id=0)
    assert status(http) == (3, 3)
    assert next_batch(http) == [1, 2]
    assert status(http) == (4, 1)
    send(http, 5, size=1, env_id=0)
    assert status(http) == (4, 3)  # the parts are two groups now


def test_reset_forgets_everything(http: httpx.Client) -> None:
    start(http, starting_step=7)
    register_environment(http)
    submit(http, 1, 2, 3)
    send(http, 4, size=1, env_id=0)
    assert next_batch(http) == [1, 2]
    answer = http.get("/reset_data")
    assert answer.text == "Reset successful"
    assert answer.headers["content-type"].startswith("text/plain")
    for path, unregistered in BEFORE_A_TRAINER:
        assert probe(http, path).json() == unregistered, path


def test_a_run_begins_anew_after_a_reset(http: httpx.Client) -> None:
    start(http)
    register_environment(http)
    send(http, 1, size=1, env_id=0)
    http.get("/reset_data")
    register(http)
    assert register_environment(http) == WAITING
    assert next_batch(http) is None
    answer = register_environment(http)
    assert (answer["env_id"], answer["wandb_name"]) == (0, "math_0")
    assert send(http, 2, size=1, env_id=0) == {"status": "buffered", "buffer_size": 1}


def test_reset_of_nothing_is_fine(http: httpx.Client) -> None:
    assert http.get("/reset_data").text == "Reset successful"
    assert http.get("/batch").status_code == 200
