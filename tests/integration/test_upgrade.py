"""A run of an earlier version, of which every process was killed, goes on with this version."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_core.clients.run_api import TrainerClient
from tests.fixtures.run_api import start_run_api
from tests.integration.run_api_calls import ApiClient
from tests.support.batches import next_batch
from tests.support.redis_server import OwnRedis
from tests.support.wait import DEADLINE_S
from tests.upgrade.make_golden import GOLDEN, PART, QUEUED
from tests.upgrade.run import (
    DEMO,
    FACTS,
    REDIS,
    RUN_ID,
    SAVED,
    STATE_INTERVAL,
    group,
    train,
    trainer_settings,
)

MORE_STEPS = 6


@pytest.fixture
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The files of the run, in the working directory; returns what was noted when it was made."""
    with tarfile.open(GOLDEN) as packed:
        packed.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    facts: dict[str, Any] = json.loads(Path(FACTS).read_text())
    return facts


@pytest.fixture
def http(golden: dict[str, Any], tmp_path: Path) -> Iterator[ApiClient]:  # noqa: ARG001
    redis = OwnRedis(tmp_path / REDIS)
    api = start_run_api(redis.url, tmp_path, run_id=RUN_ID)
    with ApiClient(base_url=api.url, timeout=DEADLINE_S) as client:
        yield client
    api.process.stop()
    redis.process.stop()


@pytest.mark.usefixtures("golden")
def test_the_options_of_an_earlier_demo_are_read() -> None:
    command = [sys.executable, "-m", "grpo_runs", "--config", DEMO, "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def trained_markers() -> list[set[int]]:
    """Of each step, in the records of the run."""
    records = sorted(Path(SAVED, "rollouts").glob("step-*.jsonl.gz"))
    return [
        {json.loads(line)["tokens"][0] for line in gzip.decompress(path.read_bytes()).splitlines()}
        for path in records
    ]


def test_a_killed_run_of_an_earlier_version_goes_on(
    golden: dict[str, Any], http: ApiClient
) -> None:
    url, env_id = str(http.base_url), golden["env_id"]
    assert http.get("/status").json().items() >= golden["status"].items()  # Redis' data are read

    # The trainer repeats the step after its checkpoint, on the batches that were leased.
    positions = list(train(url, MORE_STEPS))
    first = STATE_INTERVAL + 1
    assert [(p.step, p.batch_id, p.epoch) for p in positions] == [
        (step, step, 2) for step in range(first, MORE_STEPS + 1)
    ]
    lines = [json.loads(line) for line in Path(SAVED, "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, MORE_STEPS + 1))
    assert trained_markers() == [{step * 2 - 1, step * 2} for step in range(1, MORE_STEPS + 1)]
    facts = http.run_facts()
    assert (facts["batches_acknowledged_total"], facts["leased_batches"]) == (MORE_STEPS, 0)

    # The environment is still registered, and completes its group. The queue has what is left.
    assert http.told(env_id)["current_step"] == MORE_STEPS
    part = group(PART, size=1, env_id=env_id)
    http.post("/scored_data", json=part).raise_for_status()
    with TrainerClient(url) as trainer:
        trainer.register(trainer_settings(url, 9).registration(first_step=MORE_STEPS))
        trainer.resume_after(MORE_STEPS)
        batch = next_batch(trainer)
    assert [g.tokens[0][0] for g in batch.groups] == [QUEUED[-1], PART, PART]
    assert http.status() == (MORE_STEPS + 1, 0)
