"""A real environment process, a real run-api and Redis; only the model's answers are canned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_core.run_api_client import TrainerClient
from grpo_local.ports import free_port
from tests.fixtures.environment import environment, register_trainer
from tests.fixtures.run_api import RunningApi, start_run_api
from tests.support.wait import DEADLINE_S
from tests.unit.env.canned import generate_answer, inference_routes
from tests.unit.env.http_stub import Answer, StubServer, stub_server

STEPS_BEYOND_THE_QUEUE = 8
"""More batches than the environment lets wait in the queue."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that an environment needs of the model."""
    from grpo_trainer.tiny_model import build_tokenizer  # brings torch

    directory = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(directory)
    return directory


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


def take(trainer: TrainerClient, steps: int) -> set[int | None]:
    """The env_ids of the groups in the next batches."""
    batches = [trainer.next_batch(DEADLINE_S) for _ in range(steps)]
    return {group.env_id for batch in batches for group in batch.groups}


def test_an_environment_survives_a_run_api_that_is_late_killed_and_reset(
    own_api: OwnApi, engine: StubServer, tokenizer: Path, tmp_path: Path
) -> None:
    log = tmp_path / "environment.log"
    every_group = ("--env.drop-equal-scores", "false")
    with environment(
        "arithmetic", own_api.url, engine.url, tokenizer, log, *every_group
    ) as process:
        process.wait_until(lambda: ("GET /health", {}) in engine.seen, DEADLINE_S)
        own_api.start()
        with TrainerClient(own_api.url) as trainer:
            register_trainer(trainer, num_steps=1000)
            taken = take(trainer, 3)
            own_api.kill()
            own_api.start()
            taken |= take(trainer, STEPS_BEYOND_THE_QUEUE)
            assert taken == {0}  # the same environment throughout: nothing that it knew was lost

            httpx.get(f"{own_api.url}/reset_data").raise_for_status()
            process.wait_until(lambda: "registering again" in log.read_text(), DEADLINE_S)
            register_trainer(trainer, num_steps=2)
            take(trainer, 2)
            assert process.wait(DEADLINE_S) == 0
    assert log.read_text().count("[info     ] registered ") == 2
