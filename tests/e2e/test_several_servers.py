"""Runs on three servers: every completion was sampled by the weights that it names, also while
servers are killed, stopped and added."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.demo_run import DEADLINE_S, NOISE
from tests.e2e.several_servers import recomputed, running_demo
from tests.support.wait import wait_for

STEPS = 50
SERVERS = ("--servers", "3", "--eval-every", "0", "--steps", str(STEPS))
MOVED = 100 * NOISE

pytestmark = [pytest.mark.full, pytest.mark.timeout(DEADLINE_S + 60)]


@pytest.mark.parametrize("mode", ["none", "lora_only", "lora_restart"])
def test_completions_have_the_logprobs_of_the_weights_that_they_name(
    mode: str, tmp_path: Path, tiny_model: Path
) -> None:
    with running_demo(tmp_path / "run", "--mode", mode, *SERVERS) as run:
        pass
    found = recomputed(run, tiny_model, is_adapter=mode != "none")
    assert run.steps == STEPS
    assert max(found.differences) < NOISE
    assert max(found.others) > MOVED
    assert len(found.versions) > (2 if mode == "lora_restart" else STEPS // 2)


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
            run.wait_for_step(STEPS)
            wait_for(lambda: "weights.committed" in log.read_text(), bool, DEADLINE_S)
        finally:
            late.terminate()
            late.wait()
    found = recomputed(run, tiny_model, is_adapter=False)
    assert run.steps == STEPS
    assert max(found.differences) < NOISE
    environment = (run.directory / "logs" / "environment.log").read_text()
    assert "group.lost" not in environment
    # It never served anything but the newest weights.
    started = next(line for line in log.read_text().splitlines() if "engine.starting" in line)
    assert "policy_version=(1, 0)" not in started
    assert "policy_version=(0, 0)" not in started
    assert "server-2 ended with SIGKILL" in run.output()
