"""A run whose trainer was killed ends with exactly the weights of an uninterrupted run.

Both runs train on the same groups, sampled once, and start from the same weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_core.clients.run_api import TrainerClient
from grpo_core.provenance.verify import STATES
from grpo_core.wire.run_api import EnvironmentCount, Registration
from grpo_core.wire.scored_group import ScoredGroup
from tests.integration.run_api_calls import REGISTRATION
from tests.support.batches import next_batch
from tests.whole_run.commands import BATCH_SIZE, ENVIRONMENT, STATE_INTERVAL, TRAINER
from tests.whole_run.journal import lines_of
from tests.whole_run.rig import DEADLINE_S, Rig
from tests.whole_run.stages import HALF_SAVED, HALF_WRITTEN, WAITING

STEPS = 8

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def emptied(rig: Rig) -> Iterator[Rig]:
    """The rig; its run is reset afterwards."""
    yield rig
    rig.kill(TRAINER, ENVIRONMENT)
    reset(rig)
    shutil.rmtree(rig.checkpoints)


@dataclass(frozen=True)
class Line:
    """One run of the given groups, in its own directory."""

    rig: Rig
    directory: Path

    def launch(self, *flags: str) -> None:
        own = ("--steps", str(STEPS), "--save-path", str(self.directory))
        metrics = ("--metrics-file", str(self.directory / "metrics.jsonl"))
        self.rig.launch(TRAINER, *own, *metrics, *flags)

    def end(self, *flags: str) -> str:
        """Start the trainer, wait for its end, and return its log."""
        self.launch(*flags)
        assert self.rig.process(TRAINER).wait(DEADLINE_S) == 0, self.rig.log(TRAINER)[-5000:]
        return self.rig.log(TRAINER)

    def killed_at(self, stage: str, steps: int, *flags: str) -> None:
        """Start the trainer, and kill it at the first such stage after a number of recorded steps.
        It cannot pass a stage unnoticed: the test requests a stop before the trainer starts, and
        again before each release."""
        asked = self.rig.ask_for(stage)
        try:
            self.launch(*flags)
            self.rig.wait_for_stop(asked)
            while len(self.records()) < steps:
                self.rig.wait_for_stop(self.rig.ask_for(stage))
            self.rig.kill(TRAINER)
        finally:
            self.rig.release()

    def records(self) -> list[dict[str, Any]]:
        return lines_of(self.directory / "metrics.jsonl")

    def losses(self) -> list[tuple[int, float, float]]:
        return [(r["step"], r["train/loss"], r["train/grad_norm"]) for r in self.records()]

    def weights(self) -> bytes:
        return (self.directory / "final_model" / "model.safetensors").read_bytes()


def reset(rig: Rig) -> None:
    httpx.get(f"{rig.run_api_url}/reset_data").raise_for_status()


def registered(rig: Rig) -> TrainerClient:
    trainer = TrainerClient(rig.run_api_url)
    # The environment feeds the current run, at any step.
    registration = REGISTRATION | {"batch_size": BATCH_SIZE, "num_steps": -1}
    trainer.register(Registration.model_validate(registration))
    return trainer


def sample_groups(rig: Rig) -> list[ScoredGroup]:
    """The groups for all steps, from the environment, which then ends."""
    with rig.held_at(WAITING):  # not during an update, which would tear the weights
        rig.kill(TRAINER)
    with registered(rig) as trainer:
        batches = [next_batch(trainer) for _ in range(STEPS)]
    rig.kill(ENVIRONMENT)
    return [group for batch in batches for group in batch.groups]


def begin_run(rig: Rig, groups: list[ScoredGroup]) -> None:
    """A run that gets exactly these groups."""
    reset(rig)
    registered(rig).close()
    for group in groups:
        body = group.model_dump(mode="json")
        httpx.post(f"{rig.run_api_url}/scored_data", json=body).raise_for_status()


def test_a_killed_run_ends_as_if_it_had_been_left_alone(emptied: Rig, tmp_path: Path) -> None:
    rig = emptied
    groups = sample_groups(rig)
    alone, killed = Line(rig, tmp_path / "alone"), Line(rig, tmp_path / "killed")

    begin_run(rig, groups)
    alone.end("--resume", "never", "--state-interval", "0")

    begin_run(rig, groups)
    beginning = next((alone.directory / STATES).glob("*_step_0"))
    killed.killed_at(HALF_WRITTEN, STATE_INTERVAL + 1, "--resume", str(beginning))
    # The end of the connection ends the pause, long before its lease of an hour.
    rig.wait_for(lambda: not rig.bridge_info()["paused"])
    assert not rig.bridge_info()["weights_intact"]
    killed.killed_at(HALF_SAVED, 2 * STATE_INTERVAL)
    log = killed.end()

    assert f"step={STATE_INTERVAL}" in next(row for row in log.splitlines() if "run.resumed" in row)
    assert rig.bridge_info()["weights_intact"]
    assert len(alone.losses()) == STEPS
    assert killed.losses() == alone.losses()
    assert killed.weights() == alone.weights()
    assert rig.status().items() >= {"current_step": STEPS, "queue_size": 0}.items()
    with registered(rig) as trainer:
        assert isinstance(trainer.poll(), EnvironmentCount)  # every batch is acknowledged
