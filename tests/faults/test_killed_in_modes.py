"""Engine, supervisor, trainer and Redis, killed (SIGKILL) in each mode that hands weights off.

The run goes on each time: steps in order, every publication proven by the trainer, every batch
trained once, and never a completion of weights that are neither the model's nor a publication's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.commands import REDIS, RESTART_EVERY_STEPS, SERVER, STATE_INTERVAL, TRAINER
from tests.faults.rig import EVERYTHING, ORDER, Rig
from tests.faults.staged_trainer import TRAINING, WAITING

MODES = ("lora_only", "lora_restart", "none") if EVERYTHING else ("lora_only",)
"""Where the engine restarts every three steps, each of these takes minutes."""
NOISE = 1e-4
GOES_ON_WITHIN_S = 240.0

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Rig]]:
    """One in each mode, side by side: one that waits for its engine leaves a core to the others."""
    with tempfile.TemporaryDirectory(prefix="grpo-") as sockets, ExitStack() as stack:
        rigs = [
            Rig(tmp_path_factory.mktemp(mode), Path(sockets), tiny_model, mode) for mode in MODES
        ]
        for rig in rigs:
            stack.callback(rig.close)
        for name in ORDER:
            start_all(rigs, name)
        for rig in rigs:
            rig.wait_until(
                lambda rig=rig: len(rig.records()) > RESTART_EVERY_STEPS, GOES_ON_WITHIN_S
            )  # type: ignore[misc]
        yield rigs


def start_all(rigs: list[Rig], name: str) -> None:
    for rig in rigs:
        rig.launch(name)
    for rig in rigs:
        rig.wait_until_ready(name, GOES_ON_WITHIN_S)


def hold_all(stack: ExitStack, rigs: list[Rig], stage: str) -> None:
    for rig in rigs:
        stack.enter_context(rig.held_at(stage, GOES_ON_WITHIN_S))


def check_all_go_on(rigs: list[Rig], before: list[int]) -> None:
    """Until a publication after the fault is proven. Args: before: steps recorded before it."""
    for rig, seen in zip(rigs, before, strict=True):
        check_it_goes_on(rig, seen)


def check_it_goes_on(rig: Rig, before: int) -> None:
    steps = before + RESTART_EVERY_STEPS + 1
    rig.wait_until(lambda: len(rig.records()) >= steps, GOES_ON_WITHIN_S)
    records = rig.records()[before:]
    numbers = [record["step"] for record in records]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), rig.mode
    proven = [record for record in records if "alignment/probe_max" in record]
    assert proven, rig.mode
    assert max(record["alignment/probe_max"] for record in proven) < NOISE, rig.mode
    assert max(record["alignment/probe_moved"] for record in proven) > 0, rig.mode


def recorded(rigs: list[Rig]) -> list[int]:
    return [len(rig.records()) for rig in rigs]


def test_an_engine_that_is_killed_comes_back_with_the_last_publication(runs: list[Rig]) -> None:
    with ExitStack() as stack:
        hold_all(stack, runs, WAITING)
        before = recorded(runs)
        served = [rig.bridge_info()["policy_version"] for rig in runs]
        for rig in runs:
            rig.kill_engine()
        for rig, version in zip(runs, served, strict=True):
            rig.wait_until(lambda rig=rig: rig.server_status()["crashes"] == 1, GOES_ON_WITHIN_S)  # type: ignore[misc]
            assert rig.bridge_info()["policy_version"] == version != [0, 0], rig.mode
    check_all_go_on(runs, before)


def test_a_supervisor_that_is_killed_and_started_again(runs: list[Rig]) -> None:
    with ExitStack() as stack:
        hold_all(stack, runs, TRAINING)
        before = recorded(runs)
        served = [rig.bridge_info()["policy_version"] for rig in runs]
        for rig in runs:
            rig.kill_supervisor_alone()
    start_all(runs, SERVER)
    for rig, version in zip(runs, served, strict=True):
        assert rig.bridge_info()["policy_version"] >= version, rig.mode
    check_all_go_on(runs, before)


def test_a_redis_that_is_killed_and_started_again(runs: list[Rig]) -> None:
    with ExitStack() as stack:
        hold_all(stack, runs, TRAINING)
        before = recorded(runs)
        for rig in runs:
            rig.kill(REDIS)
    start_all(runs, REDIS)
    check_all_go_on(runs, before)


def test_a_trainer_that_is_killed_goes_on_from_its_state(runs: list[Rig]) -> None:
    with ExitStack() as stack:
        hold_all(stack, runs, TRAINING)
        before = recorded(runs)
        reached = [rig.records()[-1]["step"] for rig in runs]
        for rig in runs:
            rig.kill(TRAINER)
    start_all(runs, TRAINER)
    check_all_go_on(runs, before)
    for rig, seen, step in zip(runs, before, reached, strict=True):
        assert step - STATE_INTERVAL < rig.records()[seen]["step"] <= step + 2, rig.mode


def test_no_restart_that_was_asked_for_has_cost_a_request(runs: list[Rig]) -> None:
    assert {rig.server_status()["dropped_requests"] for rig in runs} == {0}
