"""The run-api benchmark runs, on our side alone and on tiny sizes; no timing is judged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from benchmarks.run_api import SCENARIOS
from benchmarks.run_api_bench.scenario import Rig, Scenario
from benchmarks.run_api_bench.settings import Sizes
from benchmarks.run_api_bench.systems import RunningServer, System, start_run_api
from benchmarks.run_api_bench.workload import Workload

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
    assert readings
    assert all(math.isfinite(reading.value) for reading in readings)
