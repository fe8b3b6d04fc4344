"""Runs on three servers: every completion was sampled by the weights that it names, also while
servers are killed, stopped and added."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_core.weights.servers import ServerState, ServerStatus
from grpo_core.weights.versions import version_id
from tests.e2e.demo_run import DEADLINE_S, NOISE
from tests.e2e.far_server import Askers, FarServer
from tests.e2e.several_servers import RunningDemo, recomputed, running_demo, send
from tests.support.wait import wait_for

STEPS = 50
SERVERS = ("--servers", "3", "--eval-every", "0", "--steps", str(STEPS))
PUBLISHES_EVERY = {"none": 1, "lora_only": 1, "lora_restart": 10}
MOVED = 100 * NOISE
STOPPED_S = 60.0
ANSWERS = 20

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
    assert summary["summary"]["servers_left"] == 1
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
        stopped = run.server("server-1")
        send(stopped, signal.SIGSTOP)
        run.wait_for_step(20)
        log = tmp_path / "late.log"
        late = run.start_another("late", log)
        try:
            send(stopped, signal.SIGCONT)
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


def test_a_run_goes_on_while_a_server_is_lost_in_each_state(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server over a slow link is killed while it fetches and while it commits a version, and
    stopped for a minute. With another data type it is refused."""
    words = ("--mode", "none", "--servers", "2", "--eval-every", "0", "--steps", "1000")
    with running_demo(tmp_path / "run", *words) as run:
        run.wait_for_step(5)
        with FarServer(run, tmp_path / "far") as far:
            figures = _killed(run, far, "fetching", lambda s: s.serves and bool(s.fetching))
            figures += _killed(run, far, "committing", lambda s: s.state is ServerState.COMMITTING)
            figures += _stopped(run, far)
            step = run.steps
            told = "of run .* serves them in float32; start this server with --dtype float32"
            assert re.search(told, far.refused("--dtype", "bfloat16"))
            run.wait_for_step(step + 5)
        run.stop()
    with capsys.disabled():
        print("", *figures, sep="\n")  # noqa: T201
    assert [record["step"] for record in run.records] == list(range(1, run.steps + 1))
    assert run.lost_groups() == {}
    found = recomputed(run, tiny_model, is_adapter=False, one_in=10)
    assert max(found.differences) < NOISE
    assert max(found.others) > MOVED


def _killed(
    run: RunningDemo, far: FarServer, state: str, is_reached: Callable[[ServerStatus], bool]
) -> list[str]:
    """Kill it in the middle of its work on the newest version, which all others then serve."""
    with far.started() as server:
        lost = far.stopped_while(server, is_reached)
        step, head = run.steps, far.head()
        assert lost.version < head
        assert f"version={version_id(head)}" not in far.log
    others_s = far.others_serve(head)
    run.wait_for_step(step + 5)
    return [
        f"{state}: the others served the version {others_s:.1f} s after the kill; "
        f"the longest step took {run.longest_step_s(step):.1f} s"
    ]


def _stopped(run: RunningDemo, far: FarServer) -> list[str]:
    """Stop it for a minute. From its return on, it serves nothing older than the newest version."""
    with far.started() as server:
        send(server, signal.SIGSTOP)
        step = run.steps
        with Askers(far.url) as askers:
            time.sleep(STOPPED_S)
            longest_s, steps, head = run.longest_step_s(step), run.steps - step, far.head()
            assert far.name not in far.names()
            began = time.monotonic()
            send(server, signal.SIGCONT)
            wait_for(lambda: len(askers.versions), lambda count: count >= ANSWERS, DEADLINE_S)
            answered_s = time.monotonic() - began
    assert min(askers.versions) >= head
    return [
        f"stopped for {STOPPED_S:g} s: {steps} steps meanwhile, the longest of {longest_s:.1f} s; "
        f"{ANSWERS} answers within {answered_s:.1f} s after its return, {askers.refused} refused"
    ]
