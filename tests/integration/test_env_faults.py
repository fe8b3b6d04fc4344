"""An environment process survives faults of a real run-api and Redis; the model is a fake."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_core.clients.run_api import TrainerClient
from grpo_core.process import ManagedProcess
from grpo_core.wire.run_api import Registration
from grpo_runs.process.ports import free_port
from tests.fixtures.run_api import start_run_api
from tests.integration.run_api_calls import REGISTRATION
from tests.support.batches import next_batch
from tests.support.canned import generate_answer, inference_routes
from tests.support.http_stub import Answer, StubServer, stub_server
from tests.support.wait import DEADLINE_S

STEPS_BEYOND_THE_QUEUE = 8
"""More batches than the environment keeps in the queue."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with only a tokenizer, which is all that an environment needs."""
    from grpo_tiny_model.model import build_tokenizer  # imports torch

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


@contextmanager
def killed_at_the_end(redis_url: str, directory: Path, port: int) -> Iterator[None]:
    """Starts run-api, always with the same run."""
    api = start_run_api(redis_url, directory, run_id=directory.name, port=port)
    try:
        yield
    finally:
        api.process.kill()


def environment(url: str, engine: StubServer, tokenizer: Path, log: Path) -> ManagedProcess:
    command = [
        *(sys.executable, "-m", "grpo_env", "arithmetic", "serve", "--no-drop-equal-scores"),
        *("--run-api-url", url, "--inference-url", engine.url),
        *("--group-size", "2", "--model", str(tokenizer), "--held-out", "0"),
    ]
    return ManagedProcess(
        "environment", command, log, {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    )


def take(trainer: TrainerClient, steps: int) -> tuple[set[int | None], list[str]]:
    """The env_ids and the items of the groups in the next batches."""
    groups = [group for _ in range(steps) for group in next_batch(trainer).groups]
    return {g.env_id for g in groups}, [(g.group_overrides or {})["item"] for g in groups]


def register_trainer(trainer: TrainerClient, steps: int) -> None:
    """Announce a trainer whose batches have 8 sequences, and poll once, as environments need."""
    options = {"batch_size": 8, "max_token_len": 400, "num_steps": steps}
    uuid = trainer.register(Registration.model_validate(REGISTRATION | options))
    httpx.get(f"{trainer.base_url}/batch", params={"trainer": uuid}).raise_for_status()


def test_environments_survive_a_run_api_that_is_late_killed_and_reset_and_their_own_end(
    redis_url: str, engine: StubServer, tokenizer: Path, tmp_path: Path
) -> None:
    """The second one goes on behind the items of the first one's accepted groups: 48, also with all
    that is in the queue or in progress fewer than the 100 of a pass."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as stack, TrainerClient(url) as trainer:

        def started(name: str) -> ManagedProcess:
            process = environment(url, engine, tokenizer, tmp_path / name)
            stack.callback(process.kill)
            return process

        first = started("first")
        first.wait_until(lambda: ("GET /health", {}) in engine.seen, DEADLINE_S)
        with killed_at_the_end(redis_url, tmp_path, port):
            register_trainer(trainer, steps=1000)
            ids, items = take(trainer, 1)
        with killed_at_the_end(redis_url, tmp_path, port):
            more_ids, more = take(trainer, STEPS_BEYOND_THE_QUEUE)
            assert ids | more_ids == {0}  # the environment process is the same, so it lost no state
            first.kill()
            second = started("second")
            items += more + take(trainer, 3)[1]
            assert len(set(items)) == len(items) == 48

            httpx.get(f"{url}/reset_data").raise_for_status()
            log = second.log_path
            second.wait_until(lambda: "registration.lost" in log.read_text(), DEADLINE_S)
            register_trainer(trainer, steps=2)
            take(trainer, 2)
            assert second.wait(DEADLINE_S) == 0
    assert "items.continued" in log.read_text()
    assert log.read_text().count("[info     ] environment.registered ") == 2
