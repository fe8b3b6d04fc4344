"""Runs on three servers: every completion was sampled by the weights that it names, also while
servers are killed, stopped and added."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.demo_run import DEADLINE_S, NOISE
from tests.e2e.several_servers import recomputed, running_demo
from tests.support.wait import wait_for

STEPS = 50
SERVERS = ("--servers", "3", "--eval-every", "0", "--steps", str(STEPS))
PUBLISHES_EVERY = {"none": 1, "lora_only": 1, "lora_restart": 10}
MOVED = 100 * NOISE

pytestmark = [pytest.mark.full, pytest.mark.timeout(DEADLINE_S + 60)]


@pytest.mark.parametrize("mode", PUBLISHES_EVERY)
def test_completions_have_the_logprobs_of_the_weights_that_they_name(
    mode: str, tmp_path: Path, tiny_model: Path
) -> None:
    """One of the servers is killed."""
    every = PUBLISHES_EVERY[mode]
    words = ("--mode", mode, *SERVERS)
    words += ("--vllm-restart-interval", str(every)) if mode == "lora_restart" else ()
    with running_demo(tmp_path / "run", *words) as run:
        run.wait_for_step(5)
        run.kill_server("server-1")
    assert [record["step"] for record in run.records] == list(range(1, STEPS + 1))
    probed = [r["alignment/probe_max"] for r in run.records if "alignment/probe_max" in r]
    assert len(probed) == STEPS // every
    assert max(probed) < NOISE
    found = recomputed(run, tiny_model, is_adapter=mode != "none")
    assert max(found.differences) < NOISE
    assert max(found.others) > MOVED
    assert len(found.versions) > STEPS // every // 2
    summary = json.loads((run.directory / "summary.json").read_text())
    assert summary["ended_servers"] == {"server-1": "SIGKILL"}
    assert [server["name"] for server in summary["servers"]] == ["server-0", "server-2"]
    assert {server["step"] for server in summary["servers"]} == {STEPS}
    assert sum(server["dropped_requests"] for server in summary["servers"]) == 0


def test_a_run_goes_on_while_servers_are_killed_stopped_and_added(
    tmp_path: Path, tiny_model: Path
) -> None:
    with running_demo(tmp_path / "run", "--mode", "none", *SERVERS) as run:
        run.wait_for_step(5)
        run.kill_server("server-2")
        run.wait_for_step(10)
        stopped = [run.server("server-1"), *run.server("server-1").children(recursive=True)]
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        run.wait_for_step(20)
        log = tmp_path / "late.log"
        late = run.start_another("server-0", "late", log)
        try:
            for process in stopped:
                process.send_signal(signal.SIGCONT)
            wait_for(lambda: "weights.committed" in log.read_text(), bool, DEADLINE_S)
            run.wait_for_step(STEPS)
        finally:
            late.terminate()
            late.wait()
    assert [record["step"] for record in run.records] == list(range(1, STEPS + 1))
    found = recomputed(run, tiny_model, is_adapter=False)
    assert max(found.differences) < NOISE
    # The late server began with the newest weights.
    started = next(line for line in log.read_text().splitlines() if "engine.starting" in line)
    assert "policy_version=(1, 0)" not in started
    assert "policy_version=(0, 0)" not in started
    assert "server-2 ended with SIGKILL" in run.output()
