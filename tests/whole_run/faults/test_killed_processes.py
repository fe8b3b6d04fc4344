"""Kills (SIGKILL) each process of a run at each stage of the trainer's step, in each mode.

`docs/contributing/faults-and-tests.md` lists them beside what is promised.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.whole_run.commands import (
    ENVIRONMENT,
    NODE,
    RANK,
    REDIS,
    RUN_API,
    SERVER,
    SHARED,
    STATE_INTERVAL,
    TRAINER,
)
from tests.whole_run.rig import INNER, Rig
from tests.whole_run.stages import HALF_WRITTEN, WAITING
from tests.whole_run.table import KILLS
from tests.whole_run.verdict import judge

ENDS_WITHIN_S = 120.0
NOTICED = {SERVER: (TRAINER, "server.connection_lost"), REDIS: (RUN_API, "request.failed")}
"""For each killed process: the log that reports its outage, and the text."""

pytestmark = pytest.mark.timeout(900)


CASES = [
    pytest.param(
        *(kill.shape, kill.victims, kill.stage),
        id=kill.case,
        marks=() if kill.always else pytest.mark.full,
    )
    for kill in sorted(KILLS, key=lambda kill: not kill.always)
]


@pytest.mark.parametrize(("rig", "names", "stage"), CASES, indirect=["rig"])
def test_the_run_goes_on_after_a_kill(rig: Rig, names: tuple[str, ...], stage: str) -> None:
    witness, words = NOTICED.get(names[0], (TRAINER, ""))
    with rig.held_at(stage):
        seen, said = len(rig.records()), rig.log(witness).count(words)
        crashes, before = rig.server_status()["crashes"], rig.records()[-1]["step"]
        batches, version = len(rig.taken()), rig.bridge_info()["policy_version"]
        rig.kill(*names)
        if names[0] in INNER and rig.mode != SHARED:
            # the restarted server needs no trainer to serve again
            rig.wait_for(lambda: rig.server_status()["crashes"] > crashes)
            assert rig.bridge_info()["policy_version"] == version
    if RUN_API in names:
        rig.wait_for_callers()
    elif words and rig.mode == SHARED:
        rig.wait_for_log(witness, words, said + 1)
    elif TRAINER in names and rig.mode == SHARED:
        require_the_server_serves(rig, is_torn=stage == HALF_WRITTEN)
    rig.start_what_is_dead()
    rig.wait_for_proof(seen)
    assert judge(rig.evidence()) == []
    status = rig.server_status()
    if names[0] in INNER:
        assert status["crashes"] == crashes + 1
    if names[0].startswith((TRAINER, RANK, NODE)):
        # the newest checkpoint was perhaps not complete
        resumed_at = min(batch["step"] for batch in rig.taken()[batches:])
        assert before - 2 * STATE_INTERVAL < resumed_at <= before + 2
    if rig.mode == SHARED:
        assert rig.bridge_info()["weights_intact"]
    else:
        assert status["dropped_requests"] == 0


def require_the_server_serves(rig: Rig, is_torn: bool) -> None:
    """Without its trainer; except if that was killed while it wrote: requests wait for a trainer
    then. test_resumed_run.py shows how the run continues."""
    # The end of the connection ends the pause, long before its lease of an hour.
    info = rig.wait_for(rig.bridge_info, lambda info: not info["paused"])
    assert info["weights_intact"] != is_torn
    assert info["state"] == ("awaiting_weights" if is_torn else "serving")
    if is_torn:
        refused = rig.launch(TRAINER, "--resume", "never")
        assert refused.wait(ENDS_WITHIN_S) == 1
        assert "TornWeights" in refused.log_tail()


class Witness(NamedTuple):
    """A process that detects a permanent outage; its deadline, and its error."""

    name: str
    flags: tuple[str, str]
    says: str


WITNESSES = {
    RUN_API: [
        Witness(TRAINER, ("--service-deadline-s", "10"), "Atropos API not reachable"),
        Witness(ENVIRONMENT, ("--run-api-deadline-s", "10"), "Atropos API not reach"),
    ],
    REDIS: [Witness(TRAINER, ("--service-deadline-s", "10"), "Redis did not answer within")],
    ENVIRONMENT: [Witness(TRAINER, ("--batch-deadline-s", "15"), "no batch within 15 s")],
    TRAINER: [Witness(ENVIRONMENT, ("--trainer-deadline-s", "10"), "the trainer took no batch")],
    SERVER: [
        Witness(TRAINER, ("--server-return-deadline-s", "10"), "did not come back within"),
        Witness(ENVIRONMENT, ("--request-deadline-s", "10"), "vllm-server answered no request"),
    ],
}


@pytest.mark.full
@pytest.mark.parametrize("victim", WITNESSES)
def test_a_process_that_does_not_come_back_is_named(rig: Rig, victim: str) -> None:
    witnesses = WITNESSES[victim]
    with rig.held_at(WAITING):
        rig.kill(*(witness.name for witness in witnesses))
    for witness in witnesses:
        rig.launch(witness.name, *witness.flags)
        rig.wait_until_ready(witness.name)
    rig.wait_for_steps(1)
    with rig.held_at(WAITING):
        rig.kill(victim)
    for witness in witnesses:
        ended = rig.process(witness.name)
        assert ended.wait(ENDS_WITHIN_S) == 1
        assert witness.says in ended.log_path.read_text()
