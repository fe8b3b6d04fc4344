"""A run whose trainer is killed ends with the weights of one that was left alone, to the last bit.

Both train on the same groups, sampled once, from the same weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_core.errors import ServiceUnavailable
from grpo_core.run_api_client import TrainerClient
from grpo_core.wire import Registration, ScoredGroup
from grpo_local.processes import ManagedProcess
from grpo_trainer.state_store import STATES
from tests.faults.commands import BATCH_SIZE, ENVIRONMENT, STATE_INTERVAL, TRAINER
from tests.faults.rig import CALL_DEADLINE_S, START_DEADLINE_S, Rig, read_records
from tests.faults.staged_trainer import SAVED, TRAINING, WAITING
from tests.integration.run_api_calls import REGISTRATION

STEPS = 8
ENDS_WITHIN_S = 420.0
BATCH_DEADLINE_S = 120.0

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def emptied(rig: Rig) -> Iterator[Rig]:
    """The rig without an environment; afterwards its run begins anew."""
    yield rig
    for name in (TRAINER, ENVIRONMENT):
        rig.kill(name)
    httpx.get(f"{rig.run_api_url}/reset_data", timeout=CALL_DEADLINE_S).raise_for_status()
    shutil.rmtree(rig.checkpoints)


@dataclass(frozen=True)
class Line:
    """One run of the same groups, in a directory of its own."""

    rig: Rig
    directory: Path

    def launch(self, *flags: str) -> ManagedProcess:
        return self.rig.launch(TRAINER, *self._flags(), *flags)

    def end(self, *flags: str) -> str:
        """Start it, wait for its end, and return its log."""
        process = self.launch(*flags)
        assert process.wait(ENDS_WITHIN_S) == 0, process.log_tail(40)
        return process.log_path.read_text()

    def killed_at(self, stage: str, steps: int, *flags: str) -> None:
        """Start it and kill it at the first such stage once so many steps are recorded.

        It passes none of them unseen: it is asked to stop before it begins, and again before it is
        let go.
        """
        asked = self.rig.ask_for(stage)
        try:
            self.launch(*flags)
            self.rig.wait_for_stop(asked, START_DEADLINE_S)
            while len(self.survivors()) < steps:
                self.rig.wait_for_stop(self.rig.ask_for(stage))
            self.rig.kill(TRAINER)
        finally:
            self.rig.let_go()

    def survivors(self) -> dict[int, dict[str, Any]]:
        """The record of each step, the last one where it was taken several times."""
        records = read_records(self.directory / "metrics.jsonl")
        return {record["step"]: record for record in records}

    def losses(self) -> list[tuple[int, float, float]]:
        return [
            (step, record["train/loss"], record["train/grad_norm"])
            for step, record in sorted(self.survivors().items())
        ]

    def weights(self) -> bytes:
        return (self.directory / "final_model" / "model.safetensors").read_bytes()

    def _flags(self) -> list[str]:
        return [
            *("--training-steps", str(STEPS)),
            *("--save-path", str(self.directory)),
            *("--metrics-file", str(self.directory / "metrics.jsonl")),
        ]


def registered(rig: Rig) -> TrainerClient:
    trainer = TrainerClient(rig.run_api_url)
    # The environment feeds the run that there is, wherever that has got to.
    registration = REGISTRATION | {"batch_size": BATCH_SIZE, "num_steps": -1}
    trainer.register(Registration.model_validate(registration))
    return trainer


def sample_groups(rig: Rig) -> list[ScoredGroup]:
    """As many as all steps need, from the environment, which then ends."""
    with rig.held_at(WAITING):  # not in the middle of an update, which would tear the weights
        rig.kill(TRAINER)
    with registered(rig) as trainer:
        batches = [trainer.next_batch(BATCH_DEADLINE_S) for _ in range(STEPS)]
    rig.kill(ENVIRONMENT)
    return [group for batch in batches for group in batch.groups]


def begin_run(rig: Rig, groups: list[ScoredGroup]) -> None:
    """A run of these groups alone."""
    httpx.get(f"{rig.run_api_url}/reset_data", timeout=CALL_DEADLINE_S).raise_for_status()
    registered(rig).close()
    for group in groups:
        body = group.model_dump(mode="json")
        url = f"{rig.run_api_url}/scored_data"
        httpx.post(url, json=body, timeout=CALL_DEADLINE_S).raise_for_status()


def test_a_killed_run_ends_as_if_it_had_been_left_alone(emptied: Rig, tmp_path: Path) -> None:
    rig = emptied
    groups = sample_groups(rig)
    alone, killed = Line(rig, tmp_path / "alone"), Line(rig, tmp_path / "killed")

    begin_run(rig, groups)
    alone.end("--resume", "never", "--state-interval", "0")

    begin_run(rig, groups)
    beginning = next((alone.directory / STATES).glob("*_step_0"))
    killed.killed_at(TRAINING, STATE_INTERVAL + 1, "--resume", str(beginning))
    killed.killed_at(SAVED, STATE_INTERVAL + 2)
    log = killed.end()

    assert "resuming" in log
    assert len(alone.losses()) == STEPS
    assert killed.losses() == alone.losses()
    assert killed.weights() == alone.weights()
    assert rig.status() == {"current_step": STEPS, "queue_size": 0}
    with registered(rig) as trainer, pytest.raises(ServiceUnavailable, match="no batch"):
        trainer.next_batch(0.1)  # every batch is acknowledged
    assert "all steps were taken before" in killed.end()
