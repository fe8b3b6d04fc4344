"""A real environment process, a real run-api and Redis; only the model's answers are canned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_core.run_api_client import TrainerClient
from grpo_local.ports import free_port
from tests.fixtures.environment import (
    BATCH_DEADLINE_S,
    EXIT_DEADLINE_S,
    environment,
    register_trainer,
)
from tests.fixtures.run_api import RunningApi, start_run_api
from tests.unit.env.canned import generate_answer, inference_routes
from tests.unit.env.http_stub import Answer, StubServer, stub_server

STEPS = 12
JOIN_DEADLINE_S = 120.0


@pytest.fixture
def engine() -> Iterator[StubServer]:
    """Answers every prompt with 7 and 8."""

    def generate(body: dict[str, Any]) -> Answer:
        prompt_ids = body["prompt"]["prompt_token_ids"]
        return 200, generate_answer(["7", "8"], prompt_token_ids=prompt_ids)

    with stub_server(inference_routes(generate)) as server:
        yield server


class OwnApi:
    """A run-api that this test may kill and start again on the same port, with the same data."""

    def __init__(self, redis_url: str, directory: Path) -> None:
        self._redis_url = redis_url
        self._directory = directory
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._running: RunningApi | None = None

    def start(self) -> None:
        self._running = start_run_api(
            self._redis_url, self._directory, run_id=self._directory.name, port=self._port
        )

    def kill(self) -> None:
        if self._running is not None:
            self._running.process.kill()
            self._running = None


@pytest.fixture
def own_api(redis_url: str, tmp_path: Path) -> Iterator[OwnApi]:
    api = OwnApi(redis_url, tmp_path)
    yield api
    api.kill()


def feeding(api: OwnApi, engine: StubServer, model: Path, directory: Path) -> Any:
    """An environment that sends every group, whatever its scores."""
    return environment(
        "arithmetic",
        api.url,
        engine.url,
        model,
        directory / "environment.log",
        *("--env.drop-equal-scores", "false"),
    )


def take(trainer: TrainerClient, steps: int) -> list[int | None]:
    """The env_ids of all groups in the next batches."""
    batches = [trainer.next_batch(BATCH_DEADLINE_S) for _ in range(steps)]
    return [group.env_id for batch in batches for group in batch.groups]


def test_a_run_goes_on_after_run_api_was_killed(
    own_api: OwnApi, engine: StubServer, tiny_model: Path, tmp_path: Path
) -> None:
    own_api.start()
    with TrainerClient(own_api.url) as trainer:
        register_trainer(trainer, num_steps=STEPS)
        with feeding(own_api, engine, tiny_model, tmp_path) as process:
            seen = take(trainer, 4)
            own_api.kill()
            own_api.start()
            seen += take(trainer, STEPS - 4)
            assert process.wait(EXIT_DEADLINE_S) == 0
    # The same environment throughout: nothing that it knew was lost.
    assert set(seen) == {0}


def test_an_environment_that_starts_before_run_api_waits_for_it(
    own_api: OwnApi, engine: StubServer, tiny_model: Path, tmp_path: Path
) -> None:
    with feeding(own_api, engine, tiny_model, tmp_path) as process:
        process.wait_until(lambda: ("GET /health", {}) in engine.seen, JOIN_DEADLINE_S)
        own_api.start()
        with TrainerClient(own_api.url) as trainer:
            register_trainer(trainer, num_steps=2)
            take(trainer, 2)
        assert process.wait(EXIT_DEADLINE_S) == 0


def test_a_run_that_was_reset_is_joined_again(
    own_api: OwnApi, engine: StubServer, tiny_model: Path, tmp_path: Path
) -> None:
    own_api.start()
    with TrainerClient(own_api.url) as trainer:
        register_trainer(trainer, num_steps=1000)
        with feeding(own_api, engine, tiny_model, tmp_path) as process:
            take(trainer, 3)
            httpx.get(f"{own_api.url}/reset_data").raise_for_status()
            log = tmp_path / "environment.log"
            process.wait_until(lambda: "registering again" in log.read_text(), JOIN_DEADLINE_S)
            register_trainer(trainer, num_steps=2)
            take(trainer, 2)
            assert process.wait(EXIT_DEADLINE_S) == 0
    assert log.read_text().count("[info     ] registered ") == 2
