"""Two processes share one weight on the GPU: one writes in place, the other's captured graph reads.

Without vLLM, so that a failure shows which half of the system is broken.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from grpo_core.errors import ServiceUnavailable
from grpo_core.weights.socket import connect_weights
from grpo_trainer.weight_sync.shared_memory import MappedWeights, map_weights
from tests.gpu.exporter import COLUMNS, ROWS, SMALL
from tests.support.wait import wait_for

START_DEADLINE_S = 90.0
SETTLING_S = 2.0


@dataclass(frozen=True)
class Exporter:
    process: subprocess.Popen[str]
    socket: Path

    def ask(self, what: str) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


@contextmanager
def exporter(
    *flags: str, generation: str = "first", environment: dict[str, str] | None = None
) -> Iterator[Exporter]:
    directory = Path(tempfile.mkdtemp(prefix="grpo-"))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.exporter", str(directory / "s"), generation, *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "the exporter's error is above"
        yield Exporter(process, directory / "s")
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory)


@contextmanager
def attached(server: Exporter) -> Iterator[MappedWeights]:
    with connect_weights(server.socket) as connection:
        yield map_weights(connection)


def write(weights: MappedWeights, value: float) -> None:
    """Set every element of both parameters to `value`."""
    for region in weights.manifest.parameters.values():
        weights.view(region).fill_(value)
    weights.wait_until_written()


def expected(value: float) -> float:
    return value * (ROWS * COLUMNS + SMALL)


def test_a_captured_graph_reads_what_the_other_process_wrote() -> None:
    with exporter() as server, attached(server) as weights:
        assert server.ask("replay") == 0.0
        for value in (1.0, 2.0, -0.5):
            write(weights, value)
            assert server.ask("replay") == pytest.approx(expected(value), rel=1e-5)


def test_nothing_is_copied() -> None:
    before = torch.cuda.memory_allocated()
    with exporter() as server:
        theirs = server.ask("allocated")
        with attached(server) as weights:
            write(weights, 1.0)
            assert torch.cuda.memory_allocated() - before < 1024
            assert server.ask("allocated") == theirs


def test_a_graph_of_a_private_copy_sees_nothing() -> None:
    """The negative control: if it passed, the test above would prove nothing."""
    with exporter("--private-copy") as server, attached(server) as weights:
        write(weights, 1.0)
        assert server.ask("replay") == pytest.approx(expected(1.0) - ROWS * COLUMNS)


def test_consumers_may_follow_each_other() -> None:
    """Each consumer gets its own export, so that torch's count of users stays right."""
    with exporter() as server:
        for value in (1.0, 2.0, 3.0):
            with attached(server) as weights:
                write(weights, value)
            assert server.ask("replay") == pytest.approx(expected(value), rel=1e-5)


def test_a_server_that_starts_again_has_another_generation_and_other_memory() -> None:
    with exporter(generation="first") as first, connect_weights(first.socket) as connection:
        weights = map_weights(connection)
        write(weights, 1.0)
        first.process.kill()
        first.process.wait()
        wait_for(connection.server_has_closed, deadline_s=5.0)
    with exporter(generation="second") as second, attached(second) as weights:
        assert weights.manifest.generation == "second"
        assert second.ask("replay") == 0.0
        write(weights, 2.0)
        assert second.ask("replay") == pytest.approx(expected(2.0), rel=1e-5)


CONSUMER = f"""
import sys, time
from pathlib import Path
import torch
from grpo_core.weights.socket import connect_weights
from grpo_trainer.weight_sync.shared_memory import map_weights
from grpo_trainer.weight_sync.shared_memory import MappedWeights

connection = connect_weights(Path(sys.argv[1]))
weights = map_weights(connection)
views = [weights.view(region) for region in weights.manifest.parameters.values()]
print("attached", flush=True)
deadline = time.monotonic() + {START_DEADLINE_S}
while not connection.server_has_closed():
    assert time.monotonic() < deadline
    time.sleep(0.02)
own = torch.ones(1000, device="cuda")
print("noticed", flush=True)
sys.stdin.readline()
del views, weights
connection.close()
torch.cuda.synchronize()
assert float(own.sum()) == 1000
print("let go", flush=True)
sys.stdin.readline()
"""


def test_an_exporter_that_is_killed_takes_nobody_along_and_its_memory_comes_back() -> None:
    """The consumer detects the end, releases the memory and can still compute; the memory
    is free."""
    with exporter() as server:
        consumer = subprocess.Popen(
            [sys.executable, "-c", CONSUMER, str(server.socket)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert consumer.stdout is not None
            assert consumer.stdout.readline() == "attached\n"
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
            assert consumer.stdout.readline() == "noticed\n"
            time.sleep(SETTLING_S)  # memory that only the exporter used is free by then
            free = torch.cuda.mem_get_info()[0]
            assert consumer.stdin is not None
            consumer.stdin.write("let go\n")
            consumer.stdin.flush()
            assert consumer.stdout.readline() == "let go\n"
            size = 4 * ROWS * COLUMNS
            wait_for(lambda: torch.cuda.mem_get_info()[0] - free > 0.9 * size, deadline_s=20.0)
        finally:
            consumer.kill()
            consumer.wait()


def test_expandable_segments_are_refused_with_what_to_do() -> None:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    with (
        exporter(environment=environment) as server,
        pytest.raises(ServiceUnavailable, match="expandable_segments:True in PYTORCH_ALLOC"),
    ):
        connect_weights(server.socket)


def test_another_pid_namespace_is_noticed_before_cuda_is_asked() -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-p", "-f", "true"], check=False).returncode:
        pytest.skip("no PID namespace can be made here")
    with exporter() as server:
        done = subprocess.run(
            [unshare, "-p", "-f", sys.executable, "-c", CONSUMER, str(server.socket)],
            capture_output=True,
            text=True,
            timeout=START_DEADLINE_S,
        )
    assert done.returncode != 0
    assert "UnreachableWeights" in done.stderr
    assert "different PID namespaces" in done.stderr
