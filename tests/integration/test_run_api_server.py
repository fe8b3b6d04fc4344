"""`/`, `/health`, `/status`, `/reset_data`, and every question before a trainer registers."""

from __future__ import annotations

import httpx

from tests.integration.run_api_calls import (
    WAITING,
    next_batch,
    probe,
    register,
    register_environment,
    send,
    start,
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
BEFORE_A_TRAINER = {
    "/": {"message": "AtroposLib API"},
    "/health": {"status": "ok"},
    "/status": {"current_step": 0, "queue_size": 0},
    "/info": {"batch_size": -1, "max_token_len": -1},
    "/wandb_info": {"group": None, "project": None},
    "/environments": [],
    "/batch": NOT_REGISTERED,
    "/latest_example": {name: [] for name in EXAMPLE_KEYS},
}


def assert_unregistered(http: httpx.Client) -> None:
    for path, expected in BEFORE_A_TRAINER.items():
        answer = probe(http, path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        assert answer.json() == expected, path


def test_before_a_trainer_registers(http: httpx.Client) -> None:
    assert_unregistered(http)


def test_a_reset_forgets_everything_and_a_run_begins_anew(http: httpx.Client) -> None:
    start(http, starting_step=7)
    register_environment(http)
    submit(http, 1, 2, 3)
    send(http, 4, size=1, env_id=0)
    assert next_batch(http) == [1, 2]
    answer = http.get("/reset_data")
    assert answer.text == "Reset successful"
    assert answer.headers["content-type"].startswith("text/plain")
    assert_unregistered(http)

    register(http)
    assert register_environment(http) == WAITING
    assert next_batch(http) is None
    again = register_environment(http)
    assert (again["env_id"], again["wandb_name"]) == (0, "math_0")
    assert send(http, 2, size=1, env_id=0) == {"status": "buffered", "buffer_size": 1}
