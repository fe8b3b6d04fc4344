"""The archived trainer's code registers with run-api, takes its batches, pads and trains on them.

The groups come from an environment on atroposlib. It pauses at a full queue, and survives a restart
of Redis.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_local.ports import free_port
from grpo_local.processes import ManagedProcess
from grpo_local.redis_server import bundled_redis, start_redis
from tests.compat.training_run import TrainingRun
from tests.compat.upstream_install import Upstream
from tests.compat.upstream_processes import (
    MAX_TOKEN_LENGTH,
    left_in_session_of,
    run_archived_trainer,
    start_environment,
)
from tests.fixtures.inference import InferenceServer
from tests.fixtures.run_api import start_run_api

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]  # the first use installs atroposlib

MICRO_BATCH, ACCUMULATION, GROUP_SIZE = 4, 4, 4
BATCH_SIZE = MICRO_BATCH * ACCUMULATION
FULL_QUEUE = 3 * BATCH_SIZE // GROUP_SIZE
"""Groups at which the environment pauses: `max_batches_offpolicy` is 3 unless set."""
FULLEST_QUEUE = FULL_QUEUE + 8
"""Its 8 workers may each add a group before it sees that the queue is full."""
STEPS = 5
WIDTH = 64
"""Tokens that the archived trainer pads to a multiple of; a sum takes fewer than 64."""
NOISE_NATS = 1e-4
QUEUE_DEADLINE_S = 300.0
STATUS_ASKED = 10
"""Times that the environment asks for the status at a full queue before it counts as paused; while
it samples, some groups arrive between any two."""
ENVIRONMENT_END_DEADLINE_S = 300.0


@dataclass(frozen=True)
class ArchivedRun:
    registration: Any
    queue_while_paused: int
    queue_after_redis_restart: int
    training: Any
    environment_exit: int
    left_processes: list[int]


@pytest.fixture(scope="module")
def run(
    upstream: Upstream,
    shared_server: InferenceServer,
    training_run: TrainingRun,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ArchivedRun]:
    directory = tmp_path_factory.mktemp("archived-trainer")
    redis_port = free_port()
    started = [start_redis(redis_port, directory, bundled_redis())]
    try:
        api = start_run_api(f"redis://127.0.0.1:{redis_port}/0", directory)
        started.append(api.process)
        environment = start_environment(upstream, api.url, shared_server, directory)
        started.append(environment)
        config = _config(api.url, training_run.final_model)
        registration = run_archived_trainer(
            upstream, {"action": "register", "config": config}, directory
        )
        _wait_for_pause(environment)
        paused = _queue_size(api.url)
        started[0].stop()
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(_queue_size, api.url)
            started[0] = start_redis(redis_port, directory, bundled_redis())
            after_restart = held.result()
        training = run_archived_trainer(upstream, {"action": "train", "config": config}, directory)
        environment_exit = environment.wait(ENVIRONMENT_END_DEADLINE_S)
        left = left_in_session_of(environment)
        yield ArchivedRun(
            registration=registration,
            queue_while_paused=paused,
            queue_after_redis_restart=after_restart,
            training=training,
            environment_exit=environment_exit,
            left_processes=left,
        )
    finally:
        for process in reversed(started):
            process.stop()


def _config(api_url: str, model: Path) -> dict[str, Any]:
    return {
        "model_name": str(model),
        "atropos_url": api_url,
        "batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "seq_len": MAX_TOKEN_LENGTH,
        "training_steps": STEPS,
        "device": "cpu",
        "optimizer": "adamw",
    }


def _queue_size(api_url: str) -> int:
    size: int = httpx.get(f"{api_url}/status").raise_for_status().json()["queue_size"]
    return size


def _wait_for_pause(environment: ManagedProcess) -> None:
    def has_paused() -> bool:
        sizes = re.findall(r"Status dict: .*'queue_size': (\d+)", environment.log_path.read_text())
        return sum(int(size) >= FULL_QUEUE for size in sizes) >= STATUS_ASKED

    environment.wait_until(has_paused, QUEUE_DEADLINE_S)


def test_registration_and_first_poll(run: ArchivedRun) -> None:
    assert run.registration == {"reachable": True, "first_poll": {"batch": None}}


def test_the_environment_pauses_at_a_full_queue_and_survives_a_restart_of_redis(
    run: ArchivedRun,
) -> None:
    assert FULL_QUEUE <= run.queue_while_paused <= run.queue_after_redis_restart <= FULLEST_QUEUE
    assert run.environment_exit == 0
    assert run.left_processes == []


def test_every_batch_is_whole(run: ArchivedRun) -> None:
    """Items carry all 14 keys, else the script had ended with a KeyError."""
    assert run.training["environments"] == [0]
    assert set(run.training["scores"]) == {0.0, 1.0}
    steps = run.training["steps"]
    assert len(steps) >= FULL_QUEUE * GROUP_SIZE // BATCH_SIZE
    for step in steps:
        assert (step["sequences"], step["widths"]) == (BATCH_SIZE, [WIDTH])
        assert (step["prompt_logprobs"], step["temperatures"]) == ([1.0], [1.0])
        assert step["largest_sampled_logprob"] <= 0.0


def test_training_steps_see_the_weights_that_sampled(run: ArchivedRun) -> None:
    """By the archived trainer's own measure, on the weights that our trainer left in the server."""
    first, *later = run.training["steps"]
    assert first["alignment"]["alignment/diff_max"] < NOISE_NATS
    assert first["mean_ratio"] == pytest.approx(1.0, abs=NOISE_NATS)
    assert all(0.0 < step["grad_norm"] < 100.0 for step in (first, *later))
