"""The plan that the supervisor sends to the fork server; vLLM's processes end when the engine that
started them is killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_vllm import engine_protocol
from grpo_vllm.engine_protocol import EnginePlan
from tests.support.process_table import is_alive
from tests.support.wait import wait_for

FORKED = """
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
child.start()
"""
SPAWNED = """
code = "import time, grpo_vllm.engine.plugin as p; p.register(); print(); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE)
child.stdout.readline()  # it has loaded the plugin
"""
ENGINE_PROCESS = """
import multiprocessing, subprocess, sys, time
from grpo_vllm.engine.plugin import tie_children_to_this_process
tie_children_to_this_process([])
{start}
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(FORKED, id="forked"),
        pytest.param(SPAWNED, id="spawned", marks=pytest.mark.full),
    ],
)
def test_what_it_started_ends_with_it(start: str) -> None:
    command = [sys.executable, "-c", ENGINE_PROCESS.format(start=start)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        try:
            assert engine.stdout is not None
            pid = int(engine.stdout.readline())
            assert is_alive(pid)
        finally:
            engine.kill()
    wait_for(lambda: not is_alive(pid))


def test_what_it_forks_does_not_hold_its_connections_open() -> None:
    code = """
import multiprocessing, os, socket, sys
from grpo_vllm.engine.plugin import tie_children_to_this_process
ours, other = socket.socketpair()
before = os.stat(ours.fileno())
tie_children_to_this_process([ours.fileno()])
def look():
    open_files = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    inodes = [os.stat(path).st_ino for path in open_files if os.path.exists(path)]
    assert before.st_ino not in inodes
child = multiprocessing.get_context("fork").Process(target=look)
child.start()
child.join()
assert os.path.samestat(os.stat(ours.fileno()), before), "its own stays"
sys.exit(child.exitcode)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@settings(max_examples=10)  # hundreds of real descriptors in each plan
@given(parked=st.integers(0, 2 * engine_protocol._DESCRIPTORS_PER_PACKET + 1))
def test_a_plan_arrives_with_the_receivers_own_descriptors_of_the_same_files(parked: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    files = [os.memfd_create(str(i)) for i in range(4 + parked)]
    plan = EnginePlan(
        channel=files[0], public=files[1], private=files[2], control=files[3], parked=files[4:]
    )
    with ours, theirs:
        engine_protocol.send_plan(ours, plan)
        received = engine_protocol.receive_plan(theirs)
        assert received is not None
        ours.close()
        assert engine_protocol.receive_plan(theirs) is None
    assert not set(received.descriptors()) & set(files)
    for sent, got in zip(plan.descriptors(), received.descriptors(), strict=True):
        assert os.path.samestat(os.fstat(sent), os.fstat(got))
    assert received.weights == plan.weights
    for descriptor in (*files, *received.descriptors()):
        os.close(descriptor)
