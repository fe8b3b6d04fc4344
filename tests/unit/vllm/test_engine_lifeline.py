"""Processes that an engine process leaves behind when it is killed."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

FORKED = "multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))"
SPAWNED = (
    "subprocess.Popen([sys.executable, '-c', 'import time; from grpo_vllm.plugin import register; "
    "register(); print(1, flush=True); time.sleep(60)'])"
)
ENGINE_PROCESS = """
import multiprocessing, subprocess, sys, time
from grpo_vllm.engine_lifeline import hold_lifeline
hold_lifeline()
child = {child}
getattr(child, "start", lambda: None)()
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("child", [FORKED, SPAWNED], ids=["forked", "spawned"])
def test_what_it_started_ends_with_it(child: str) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE_PROCESS.format(child=child)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert engine.stdout is not None
        lines = 2 if child == SPAWNED else 1  # a spawned one says when it has loaded the plugin
        pid = max(int(engine.stdout.readline()) for _ in range(lines))
        started = psutil.Process(pid)
        engine.kill()
        engine.wait()
        give_up_at = time.monotonic() + 5.0
        while started.is_running() and started.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < give_up_at, "it lives on"
            time.sleep(0.05)
    finally:
        engine.kill()
        engine.wait()
        if engine.stdout is not None:
            engine.stdout.close()
