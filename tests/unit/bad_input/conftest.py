"""Files that the project's own code has written, to be damaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_core.curriculum import POOLS_FILE
from tests.support.conversations import group
from tests.support.threads import one_thread
from tests.unit.runs.commands.test_compare_modes import facts
from tests.unit.runs.watch.written_runs import WrittenRun


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.unit.trainer.tiny_policy import model_directory

    return model_directory(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="package")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """--save-path of a short run, which was killed and resumed."""
    from tests.unit.runs.replay.recorded import train

    return train(str(model), tmp_path_factory.mktemp("trained") / "saved")


@pytest.fixture(scope="package")
def run(tmp_path_factory: pytest.TempPathFactory) -> WrittenRun:
    """A whole run, as far as commands read it."""
    options = {"task": ["sums"], "seed": 3, "optim": {"lr": 0.001}}
    run = WrittenRun(tmp_path_factory.mktemp("whole") / "run", options)
    for step in (1, 2):
        run.step(step, step / 10, group("1+2=", [("3", 1.0), ("4", 0.0)], step=step))
        run.evaluate(step, step / 4)
    run.start("run-api", "vllm-server", "trainer", "environment")
    run.stage("compute", since=1.0)
    run.log("trainer", "warning", "disk.slow", "seconds=3")
    run.log("environment", "info", "groups.counted", "groups_in_progress=3 evaluated=1/4")
    pools = run.run.curricula / "sums" / POOLS_FILE
    pools.parent.mkdir(parents=True)
    pools.write_text('{"step": 2, "curriculum/sums/easy": 7}\n')
    run.run.summary.write_text(facts().model_dump_json())
    return run
