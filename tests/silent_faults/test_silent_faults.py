"""Silent faults are named in a real run, and a healthy run gets no warning.

The session's server samples the groups, and a real run-api delivers them. `make silent-faults` runs
every fault on new and on old data, and thousands of healthy steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_trainer.checks.rollouts import LOOK_EVERY_STEPS
from tests.fixtures.inference import FLOAT32_NOISE, InferenceServer
from tests.silent_faults.faults import ALSO, FAULTS, LORA, SHARED, Fault
from tests.silent_faults.runs import Site, lora_site, run_with, shared_site

LEAST_FAULTS, LEAST_THREADS = 40, 15
IN_MAKE_TEST = {"stale weights", "shifted logprobs"}
HEALTHY_STEPS = LOOK_EVERY_STEPS + 1
OF_EVERY_TEST = [
    pytest.param(name, marks=() if name in IN_MAKE_TEST else pytest.mark.full)
    for name, fault in (FAULTS | ALSO).items()
    if fault.mode == SHARED
]
OF_ADAPTERS = [name for name, fault in FAULTS.items() if fault.mode == LORA]


@pytest.fixture(scope="module")
def site(shared_server: InferenceServer, run_api_url: str) -> Iterator[Site]:
    with shared_site(shared_server, run_api_url) as found:
        yield found


@pytest.fixture(scope="module")
def adapters(
    tiny_model: Path, redis_url: str, run_api_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("adapters")
    with lora_site(tiny_model, redis_url, run_api_url, directory) as found:
        yield found


def test_the_faults_are_many_and_have_threads() -> None:
    threads = {fault.thread for fault in FAULTS.values() if fault.thread}
    assert len(FAULTS) >= LEAST_FAULTS
    assert len(threads) >= LEAST_THREADS
    assert all(fault.named for fault in (FAULTS | ALSO).values())


@pytest.mark.parametrize("name", OF_EVERY_TEST)
def test_a_fault_is_named(name: str, site: Site, tmp_path: Path) -> None:
    fault = FAULTS.get(name) or ALSO[name]
    assert run_with(fault, site, tmp_path).first(fault.named)


@pytest.mark.full
@pytest.mark.parametrize("name", OF_ADAPTERS)
def test_a_fault_of_an_adapter_is_named(name: str, adapters: Site, tmp_path: Path) -> None:
    assert run_with(FAULTS[name], adapters, tmp_path).first(FAULTS[name].named)


@pytest.mark.parametrize("batches_late", [pytest.param(0, marks=pytest.mark.full), 2])
def test_nothing_is_said_of_a_healthy_run(batches_late: int, site: Site, tmp_path: Path) -> None:
    healthy = Fault("nothing", ())
    outcome = run_with(healthy, site, tmp_path, batches_late, steps=HEALTHY_STEPS, lr=3e-5)
    assert outcome.error is None
    assert outcome.reports == []
    assert len(outcome.records) == HEALTHY_STEPS
    fresh = [r for r in outcome.records if r.get("staleness/mean") == 0]
    assert len(fresh) == (1 if batches_late else HEALTHY_STEPS)
    assert max(r["alignment/fresh_diff_abs_mean"] for r in fresh) < FLOAT32_NOISE
