"""Each process of a run, killed (SIGKILL) at each stage of the trainer's step.

`docs/faults.md` holds the table that these tests show.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults.rig import (
    ENVIRONMENT,
    REDIS,
    RUN_API,
    SERVER,
    TRAINER,
    Rig,
)
from tests.faults.staged_trainer import (
    HALF_WRITTEN,
    PAUSED,
    STAGES,
    TRAINING,
    VERIFYING,
    WAITING,
)

NOISE = 1e-4
"""Bound on |served - trained log-probability| in float32: sixty times what is seen."""
OUTAGE_S = 1.0
AGAIN = "again=True"
"""In run-api's log: a batch that was handed out before."""
RESUMES_WITHIN_S = 5.0
ENDS_WITHIN_S = 60.0

pytestmark = pytest.mark.timeout(240)


def check_the_run_goes_on(rig: Rig) -> list[dict[str, Any]]:
    """Three more steps, in order, on the weights that are served; returns their records."""
    records = rig.wait_for_steps(3)
    steps = [record["step"] for record in records]
    assert steps == list(range(steps[0], steps[0] + 3))
    assert max(record["alignment/probe_max"] for record in records) < NOISE
    assert all(record["alignment/probe_moved"] > 0 for record in records)
    return records


def outstanding_batches(rig: Rig) -> int:
    """Batches that run-api has handed out beyond those that were trained on: at most the one
    under way. Fewer would be a batch trained on twice, more a lost one."""
    with rig.held_at(WAITING):
        return int(rig.status()["current_step"]) - len(rig.records())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", [RUN_API, REDIS, ENVIRONMENT, SERVER])
def test_a_process_that_is_killed_and_comes_back(rig: Rig, name: str, stage: str) -> None:
    before = outstanding_batches(rig)
    with rig.held_at(stage):
        rig.kill(name)
    time.sleep(OUTAGE_S)  # long enough for everybody to run into it
    rig.start(name)
    records = check_the_run_goes_on(rig)
    # A server that came back answered nobody with the checkpoint, whose version is another epoch's.
    assert {record["staleness/other_epoch_fraction"] for record in records} == {0.0}
    assert outstanding_batches(rig) == before


def test_an_engine_killed_under_its_server(rig: Rig) -> None:
    """The server answers for a moment longer, then ends by itself; the trainer is publishing."""
    before = outstanding_batches(rig)
    with rig.held_at(TRAINING):
        rig.kill_engine()
    assert rig.process(SERVER).wait(ENDS_WITHIN_S) == 1
    rig.start(SERVER)
    check_the_run_goes_on(rig)
    assert outstanding_batches(rig) == before


@pytest.mark.parametrize(("stage", "trained_twice"), [(WAITING, 1), (TRAINING, 0), (VERIFYING, 0)])
def test_a_trainer_killed_outside_of_an_update(rig: Rig, stage: str, trained_twice: int) -> None:
    """The next one goes on from the served weights, with the batch that was not acknowledged.

    Until the next poll that is the batch trained on last: already recorded where the trainer was
    about to poll, not yet where it was about to verify.
    """
    before = outstanding_batches(rig)
    handed_out_again = rig.log(RUN_API).count(AGAIN)
    with rig.held_at(stage):
        rig.kill(TRAINER)
    assert not rig.bridge_info()["paused"]
    assert rig.bridge_info()["weights_intact"]
    rig.start(TRAINER)
    check_the_run_goes_on(rig)
    assert rig.log(RUN_API).count(AGAIN) == handed_out_again + 1
    assert outstanding_batches(rig) == before - trained_twice


@pytest.mark.parametrize("stage", [PAUSED, HALF_WRITTEN])
def test_a_trainer_killed_while_it_may_be_writing(rig: Rig, stage: str) -> None:
    """The server goes on at once and says that its weights may be torn; the next trainer refuses
    them by name. A restart of the server makes them whole."""
    with rig.held_at(stage):
        assert rig.bridge_info()["paused"]
        rig.kill(TRAINER)
        rig.wait_for_end_of_pause(RESUMES_WITHIN_S)
    assert not rig.bridge_info()["weights_intact"]
    refused = rig.launch(TRAINER)
    assert refused.wait(ENDS_WITHIN_S) == 1
    assert "TornWeights" in refused.log_tail()
    rig.kill(SERVER)
    rig.start(SERVER)
    rig.start(TRAINER)
    check_the_run_goes_on(rig)


@dataclass(frozen=True)
class Witness:
    """Who notices, with which deadline, and what it says at its end."""

    name: str
    flags: tuple[str, str]
    says: str


@pytest.mark.parametrize(
    ("victim", "witnesses"),
    [
        (
            RUN_API,
            [
                Witness(TRAINER, ("--service-deadline-s", "2"), "Atropos API not reachable"),
                Witness(ENVIRONMENT, ("--env.run-api-deadline-s", "2"), "Atropos API not reach"),
            ],
        ),
        (
            REDIS,
            [Witness(TRAINER, ("--service-deadline-s", "2"), "Redis did not answer within")],
        ),
        (ENVIRONMENT, [Witness(TRAINER, ("--batch-deadline-s", "15"), "no batch within 15 s")]),
        (TRAINER, [Witness(ENVIRONMENT, ("--env.trainer-deadline-s", "2"), "no batch was taken")]),
        (
            SERVER,
            [
                Witness(TRAINER, ("--server-return-deadline-s", "2"), "did not come back within"),
                Witness(ENVIRONMENT, ("--openai.request-deadline-s", "2"), "vllm-server failed"),
            ],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_process_that_does_not_come_back_is_named(
    rig: Rig, victim: str, witnesses: list[Witness]
) -> None:
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
