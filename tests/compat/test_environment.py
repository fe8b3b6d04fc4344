"""Environments on unmodified atroposlib 0.4.0 feed our trainer through our servers.

Two at once, with groups of different sizes, and minimums that leave a quarter of every batch to
the faster one.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from grpo_core.process import ManagedProcess
from grpo_runs.services import child_environment
from tests.compat.upstream_install import Upstream
from tests.compat.upstream_processes import left_in_session_of, start_environment
from tests.fixtures.inference import InferenceServer

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]  # the first use installs atroposlib

NOISE_NATS = 1e-4
"""float32 rounding between vLLM's kernels and torch's; seen: 2e-6."""

STALE_NATS = 0.5
"""Mean of data that is some steps old; seen: 0.1. Shifted by one token it is over 1.2."""

STEPS = 8
BATCH_SIZE = 32
MAX_TOKEN_LENGTH = 128
TRAINING_DEADLINE_S = 400.0
ENVIRONMENT_END_DEADLINE_S = 300.0


@dataclass(frozen=True)
class Share:
    """What an environment announces: its group size, and its least part of every batch."""

    group_size: int
    minimum: float

    @property
    def least_groups(self) -> int:
        """That go into one batch."""
        return int(BATCH_SIZE * self.minimum) // self.group_size


SHARES = (Share(group_size=4, minimum=0.25), Share(group_size=8, minimum=0.5))


@dataclass(frozen=True)
class TrainingRun:
    """`environment_exits` and `environment_logs` in the order of SHARES."""

    trainer_exit: int
    environment_exits: list[int]
    environment_logs: list[str]
    records: list[dict[str, float]]
    left_processes: list[int]


@pytest.fixture(scope="module")
def training_run(
    upstream: Upstream,
    run_api_url: str,
    shared_server: InferenceServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> TrainingRun:
    """Raises `ProcessFailed` if a process does not end in time."""
    directory = tmp_path_factory.mktemp("training-run")
    httpx.get(f"{run_api_url}/reset_data").raise_for_status()
    trainer = _start_trainer(run_api_url, shared_server, directory)
    environments = [
        start_environment(
            upstream,
            run_api_url,
            shared_server,
            directory / f"environment-{i}",
            f"--env.group_size {share.group_size} --env.min_batch_allocation {share.minimum}",
        )
        for i, share in enumerate(SHARES)
    ]
    ours = [trainer, *environments]
    try:
        trainer_exit = trainer.wait(TRAINING_DEADLINE_S)
        environment_exits = [process.wait(ENVIRONMENT_END_DEADLINE_S) for process in environments]
        left = [pid for process in ours for pid in left_in_session_of(process)]
    finally:
        for process in ours:
            process.stop()
    metrics = directory / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return TrainingRun(
        trainer_exit=trainer_exit,
        environment_exits=environment_exits,
        environment_logs=[process.log_path.read_text() for process in environments],
        records=[json.loads(line) for line in lines],
        left_processes=left,
    )


def _start_trainer(api_url: str, server: InferenceServer, directory: Path) -> ManagedProcess:
    options = {
        "--model-name": server.model,
        "--weight-bridge-mode": "shared_vllm",
        "--atropos-url": api_url,
        "--vllm-url": server.url,
        "--weights-socket": server.socket,
        "--training-steps": STEPS,
        "--batch-size": BATCH_SIZE,
        "--gradient-accumulation-steps": 1,
        "--seq-len": MAX_TOKEN_LENGTH,
        "--lr": 5e-5,
        "--dtype": "float32",
        "--verify-every-steps": 1,
        "--metrics-file": directory / "metrics.jsonl",
        "--save-path": directory / "checkpoints",
    }
    return ManagedProcess(
        "trainer",
        [sys.executable, "-m", "grpo_trainer", *(str(w) for pair in options.items() for w in pair)],
        directory / "trainer.log",
        child_environment(threads=1, model=str(server.model)),
    )


def test_every_process_ends_by_itself_and_leaves_none(training_run: TrainingRun) -> None:
    assert training_run.trainer_exit == 0
    assert training_run.environment_exits == [0] * len(SHARES)
    assert [record["step"] for record in training_run.records] == list(range(1, STEPS + 1))
    assert training_run.left_processes == []


def test_what_the_environments_send_lines_up_with_what_is_trained(
    training_run: TrainingRun,
) -> None:
    """The first batch was sampled by the very weights that are trained on it."""
    first, *later = training_run.records
    assert first["alignment/diff_max"] < NOISE_NATS
    assert first["grpo/mean_ratio"] == pytest.approx(1.0, abs=NOISE_NATS)
    assert all(record["alignment/diff_abs_mean"] < STALE_NATS for record in later)


def test_the_server_serves_every_update(training_run: TrainingRun) -> None:
    assert all(record["alignment/probe_max"] < NOISE_NATS for record in training_run.records)
    assert min(record["alignment/probe_moved"] for record in training_run.records) > 10 * NOISE_NATS


def test_rewards_arrive(training_run: TrainingRun) -> None:
    """atroposlib drops groups whose scores are all equal, so every batch has both kinds."""
    for record in training_run.records:
        assert 0.0 < record["reward/mean"] < 1.0
        assert record["reward/zero_variance_fraction"] == 0.0


def test_every_environment_has_its_part(training_run: TrainingRun) -> None:
    for share, log in zip(SHARES, training_run.environment_logs, strict=True):
        assert log.count('{"status":"received"}') >= share.least_groups * STEPS


def test_the_environments_meet_no_error(training_run: TrainingRun) -> None:
    for log in training_run.environment_logs:
        assert log.count("env_manager: Status dict") >= STEPS
        assert re.findall(r"^[\d.]+ (?:ERROR|CRITICAL) .*", log, re.MULTILINE) == []
