"""Each process of a run, killed (SIGKILL) at each stage of the trainer's step.

`docs/faults.md` holds the table that these tests show.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults.commands import ENVIRONMENT, REDIS, RUN_API, SERVER, STATE_INTERVAL, TRAINER
from tests.faults.rig import EVERYTHING, STEP_DEADLINE_S, Rig
from tests.faults.staged_trainer import (
    HALF_SAVED,
    HALF_WRITTEN,
    PAUSED,
    SAVING_STAGES,
    STAGES,
    TRAINING,
    WAITING,
)

NOISE = 1e-4
"""Bound on |served - trained log-probability| in float32: sixty times what is seen."""
OUTAGE_S = 1.0
RESUMES_WITHIN_S = 60.0
"""Of a pause with a lease twice as long: the end of the connection ends it."""
ENDS_WITHIN_S = 120.0
KILLED_AT = {
    RUN_API: STAGES,
    REDIS: STAGES,
    ENVIRONMENT: STAGES if EVERYTHING else [WAITING],
    SERVER: STAGES if EVERYTHING else [HALF_WRITTEN],
}
TRAINER_KILLED_AT = [*STAGES, *SAVING_STAGES] if EVERYTHING else [HALF_WRITTEN, HALF_SAVED]
NOT_COMING_BACK = [RUN_API, REDIS, ENVIRONMENT, TRAINER, SERVER] if EVERYTHING else [SERVER]

pytestmark = pytest.mark.timeout(900)


def check_the_run_goes_on(rig: Rig) -> list[dict[str, Any]]:
    """Three more steps, in order, on the weights that are served; returns their records."""
    records = rig.wait_for_steps(3)
    steps = [record["step"] for record in records]
    assert steps == list(range(steps[0], steps[0] + 3))
    assert max(record["alignment/probe_max"] for record in records) < NOISE
    assert all(record["alignment/probe_moved"] > 0 for record in records)
    return records


def require_every_batch_trained_once(rig: Rig) -> None:
    """Every step of the line that survives has had a batch of its own, and none was left out: there
    are as many batches as steps. Right after a resume there are more, which are handed out again.
    """
    give_up_at = time.monotonic() + STEP_DEADLINE_S
    while True:
        with rig.held_at(WAITING):
            batches, steps = int(rig.status()["current_step"]), rig.records()[-1]["step"]
        assert batches >= steps
        if batches == steps:
            return
        assert time.monotonic() < give_up_at, f"{batches} batches for {steps} steps"


@pytest.mark.parametrize(
    ("name", "stage"),
    [(name, stage) for name, stages in KILLED_AT.items() for stage in stages],
)
def test_a_process_that_is_killed_and_comes_back(rig: Rig, name: str, stage: str) -> None:
    with rig.held_at(stage):
        rig.kill(name)
    time.sleep(OUTAGE_S)  # long enough for everybody to run into it
    rig.start(name)
    records = check_the_run_goes_on(rig)
    # A server that came back answered nobody with the checkpoint, whose version is another epoch's.
    assert {record["staleness/other_epoch_fraction"] for record in records} == {0.0}
    require_every_batch_trained_once(rig)


def test_an_engine_killed_under_its_server(rig: Rig) -> None:
    """Its supervisor starts another, to which the trainer writes what it is about to publish."""
    with rig.held_at(TRAINING):
        rig.kill_engine()
    check_the_run_goes_on(rig)
    assert rig.server_status()["crashes"] == 1
    assert rig.is_alive(SERVER)
    require_every_batch_trained_once(rig)


@pytest.mark.parametrize("stage", TRAINER_KILLED_AT)
def test_a_trainer_that_is_killed_goes_on_from_its_state(rig: Rig, stage: str) -> None:
    """With the weights and the optimizer of the newest whole state, and the batches after it, torn
    or lost as what the server holds may be."""
    with rig.held_at(stage):
        seen = len(rig.records())
        before = rig.records()[-1]["step"]
        rig.kill(TRAINER)
    rig.wait_for_end_of_pause(RESUMES_WITHIN_S)
    assert rig.bridge_info()["weights_intact"] == (stage not in (PAUSED, HALF_WRITTEN))
    rig.start(TRAINER)
    check_the_run_goes_on(rig)
    assert rig.bridge_info()["weights_intact"]
    assert before - STATE_INTERVAL < rig.records()[seen]["step"] <= before + 2
    require_every_batch_trained_once(rig)


def test_torn_weights_are_not_trained_on_without_a_state(rig: Rig) -> None:
    with rig.held_at(HALF_WRITTEN):
        assert rig.bridge_info()["paused"]
        rig.kill(TRAINER)
        rig.wait_for_end_of_pause(RESUMES_WITHIN_S)
    refused = rig.launch(TRAINER, "--resume", "never")
    assert refused.wait(ENDS_WITHIN_S) == 1
    assert "TornWeights" in refused.log_tail()
    rig.start(TRAINER)
    check_the_run_goes_on(rig)


@dataclass(frozen=True)
class Witness:
    """Who notices, with which deadline, and what it says at its end."""

    name: str
    flags: tuple[str, str]
    says: str


WITNESSES = {
    RUN_API: [
        Witness(TRAINER, ("--service-deadline-s", "10"), "Atropos API not reachable"),
        Witness(ENVIRONMENT, ("--env.run-api-deadline-s", "10"), "Atropos API not reach"),
    ],
    REDIS: [Witness(TRAINER, ("--service-deadline-s", "10"), "Redis did not answer within")],
    ENVIRONMENT: [Witness(TRAINER, ("--batch-deadline-s", "15"), "no batch within 15 s")],
    TRAINER: [Witness(ENVIRONMENT, ("--env.trainer-deadline-s", "10"), "no batch was taken")],
    SERVER: [
        Witness(TRAINER, ("--server-return-deadline-s", "10"), "did not come back within"),
        Witness(ENVIRONMENT, ("--openai.request-deadline-s", "10"), "vllm-server failed"),
    ],
}


@pytest.mark.parametrize("victim", NOT_COMING_BACK)
def test_a_process_that_does_not_come_back_is_named(rig: Rig, victim: str) -> None:
    witnesses = WITNESSES[victim]
    with rig.held_at(WAITING):
        for witness in witnesses:
            rig.kill(witness.name)
    for witness in witnesses:
        rig.start(witness.name, *witness.flags)
    rig.wait_for_steps(1)
    with rig.held_at(WAITING):
        rig.kill(victim)
    for witness in witnesses:
        ended = rig.process(witness.name)
        assert ended.wait(ENDS_WITHIN_S) == 1
        assert witness.says in ended.log_path.read_text()
