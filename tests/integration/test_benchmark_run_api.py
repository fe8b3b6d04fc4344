"""The run-api benchmark runs, on our side alone and on tiny sizes; no timing is judged.

The scenarios take part in `make test-full` alone.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.run_api import SCENARIOS
from benchmarks.run_api_bench.metrics import AtMost, Metric, OneIn, Spread, verdict
from benchmarks.run_api_bench.process_tree import cpu_seconds
from benchmarks.run_api_bench.results_file import replace_section
from benchmarks.run_api_bench.scenario import Rig, Scenario
from benchmarks.run_api_bench.settings import Sizes
from benchmarks.run_api_bench.systems import RunningServer, System, start_run_api
from benchmarks.run_api_bench.workload import Workload
from tests.support.wait import wait_for

SIZES = Sizes(
    distinct_groups=2,
    depths=(0, 50),
    submissions=8,
    polls=10,
    full_size_depth=None,
    memory_groups=8,
    idle_s=0.1,
    large_body_bytes=1_000_000,
    bomb_bytes=65 << 20,
    large_batch_sequences=16,
    long_list_groups=50,
    minimum_depths=(20, 40),
    deeper_minimum_depths=(80,),
)
METRICS = {
    "submissions": 10,
    "status-env": 12,
    "first-batch": 6,
    "memory": 1,
    "stalls": 21,
    "minimums": 4,
}
"""How many numbers each scenario has to give."""
BURNT_S = 0.3


@dataclass(frozen=True)
class OneServer(System):
    """Every scenario gets the same server: they all begin with a new run."""

    server: RunningServer

    @contextmanager
    def running(self) -> Iterator[RunningServer]:
        yield self.server


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with System("run-api", start_run_api).running() as server:
        yield Rig(OneServer("run-api", start_run_api, server), SIZES, Workload(SIZES))


@pytest.mark.full
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_scenario_measures_run_api(rig: Rig, scenario: Scenario) -> None:
    readings = scenario.measure(rig)
    assert len({reading.metric.name for reading in readings}) == METRICS[scenario.name]
    assert all(math.isfinite(reading.value) for reading in readings)


BURN = f"import time\nwhile time.process_time() < {BURNT_S}: pass\nimport sys; sys.stdin.read()"


@pytest.mark.full
def test_cpu_time_is_that_of_children_too() -> None:
    before = cpu_seconds(os.getpid())
    subprocess.run([sys.executable, "-c", BURN], check=True)
    with subprocess.Popen(
        [sys.executable, "-c", BURN + "input()"], stdin=subprocess.PIPE
    ) as living:
        wait_for(lambda: cpu_seconds(os.getpid()) - before, lambda spent: spent >= 2 * BURNT_S)
        living.communicate()


@pytest.mark.parametrize(
    ("goal", "ours", "theirs", "expected"),
    [
        (OneIn(4), 1.0, 4.0, True),
        (OneIn(4), 1.01, 4.0, False),
        (AtMost(50.0), 50.1, 1.0, False),
        (None, 1.0, 1.0, None),
    ],
)
def test_medians_are_held_against_the_goal(
    goal: OneIn | AtMost | None, ours: float, theirs: float, expected: bool | None
) -> None:
    medians = (Spread(median, 0.0, math.inf) for median in (ours, theirs))
    assert verdict(Metric("a name", "ms", goal), *medians) is expected


def test_results_replace_their_own_section_only(tmp_path: Path) -> None:
    results = tmp_path / "RESULTS.md"
    replace_section(results, "first", ["old", "### inside", "old too"])
    replace_section(results, "second", ["kept"])
    replace_section(results, "first", ["", "new", ""])
    assert results.read_text() == ("# Results\n\n## first\n\nnew\n\n## second\n\nkept\n")
    assert list(tmp_path.iterdir()) == [results]
