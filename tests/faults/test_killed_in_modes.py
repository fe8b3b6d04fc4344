"""Engine, supervisor, trainer and Redis, killed (SIGKILL) in each mode that hands weights off.

The run goes on each time: steps in order, every publication proven by the trainer, every batch
trained once, and never a completion of weights that are neither the model's nor a publication's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.rig import (
    ORDER,
    REDIS,
    RESTART_EVERY_STEPS,
    SERVER,
    STATE_INTERVAL,
    TRAINER,
    Rig,
)
from tests.faults.staged_trainer import TRAINING, WAITING

MODES = ("lora_only", "lora_restart", "none")
NOISE = 1e-4
GOES_ON_WITHIN_S = 150.0

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=MODES)
def run(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="grpo-") as sockets:
        rig = Rig(tmp_path_factory.mktemp("faults"), Path(sockets), tiny_model, request.param)
        try:
            for name in ORDER:
                rig.start(name)
            yield rig
        finally:
            rig.close()


def check_the_run_goes_on(rig: Rig) -> None:
    """Until a publication after the fault is proven."""
    before = len(rig.records())
    steps = RESTART_EVERY_STEPS + 1
    rig.wait_until(lambda: len(rig.records()) >= before + steps, GOES_ON_WITHIN_S)
    records = rig.records()[before:]
    numbers = [record["step"] for record in records]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    proven = [record for record in records if "alignment/probe_max" in record]
    assert proven
    assert max(record["alignment/probe_max"] for record in proven) < NOISE
    assert max(record["alignment/probe_moved"] for record in proven) > 0


def test_an_engine_that_is_killed_comes_back_with_the_last_publication(run: Rig) -> None:
    run.wait_for_steps(RESTART_EVERY_STEPS)
    with run.held_at(WAITING):
        crashes = run.server_status()["crashes"]
        served = run.bridge_info()["policy_version"]
        run.kill_engine()
        run.wait_until(lambda: run.server_status()["crashes"] > crashes, GOES_ON_WITHIN_S)
        assert run.bridge_info()["policy_version"] == served != [0, 0]
    check_the_run_goes_on(run)


def test_a_supervisor_that_is_killed_and_started_again(run: Rig) -> None:
    with run.held_at(TRAINING):
        served = run.bridge_info()["policy_version"]
        run.kill_supervisor_alone()
    run.start(SERVER)
    assert run.bridge_info()["policy_version"] >= served
    check_the_run_goes_on(run)


def test_a_redis_that_is_killed_and_started_again(run: Rig) -> None:
    with run.held_at(TRAINING):
        run.kill(REDIS)
    run.start(REDIS)
    check_the_run_goes_on(run)


def test_a_trainer_that_is_killed_goes_on_from_its_state(run: Rig) -> None:
    with run.held_at(TRAINING):
        before = run.records()[-1]["step"]
        run.kill(TRAINER)
    run.start(TRAINER)
    first = len(run.records())
    check_the_run_goes_on(run)
    assert before - STATE_INTERVAL < run.records()[first]["step"] <= before + 2


def test_nobody_dropped_a_request_unasked(run: Rig) -> None:
    """Last of this file: of all restarts that were asked for, none cost a request."""
    assert run.server_status()["dropped_requests"] == 0
