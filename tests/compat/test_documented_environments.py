"""The Atropos and the verifiers environment of the documentation train the tiny model, with the
commands of their pages: only addresses, the interpreter and the model's path are others."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_core.process import ManagedProcess
from grpo_runs.services import child_environment
from tests.compat.upstream_install import Upstream
from tests.compat.upstream_processes import TUTORIAL as ATROPOS
from tests.compat.upstream_processes import installed
from tests.e2e.demo_run import NOISE, accuracy_of, load_model
from tests.fixtures.inference import InferenceServer
from tests.support.pages import ROOT, block, command

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]  # the first use installs packages

VERIFIERS = "docs/how-to/verifiers.md"
SOURCES = (ROOT / "shared", ROOT / "services/environment")
"""Of `env-server`, which the page installs beside verifiers."""
MIN_LIFT = 0.06
"""Of the mean reward over all sums, which is exact: it comes from the probabilities of the saved
model. Seen: 0.15 to 0.18 with Atropos, 0.12 to 0.28 with verifiers."""
DEADLINE_S = 900.0


@dataclass(frozen=True)
class Place:
    """Where the commands of a page run: their directory, and the servers that they name."""

    directory: Path
    run_api_url: str
    server: InferenceServer

    @property
    def replacements(self) -> dict[str, str]:
        return {
            "http://127.0.0.1:8000": self.run_api_url,
            "http://127.0.0.1:9001": self.server.url,
            "my-model": str(self.server.model),
        }

    @property
    def addresses(self) -> list[str]:
        """Options of `grpo` and of `env-server` that their pages leave at the default."""
        return ["--run-api-url", self.run_api_url, "--inference-url", self.server.url]

    def start(
        self, name: str, words: Sequence[str | Path], python_path: Sequence[Path] = ()
    ) -> ManagedProcess:
        path = {"PYTHONPATH": os.pathsep.join(map(str, python_path))} if python_path else {}
        return ManagedProcess(
            name,
            ["env", f"--chdir={self.directory}", *map(str, words)],
            self.directory / f"{name}.log",
            child_environment(threads=1, model=str(self.server.model)) | path,
        )

    def trainer(self, page: str) -> ManagedProcess:
        """The trainer of the page, which writes `metrics.jsonl`."""
        _, *options = command(page, "grpo --model", self.replacements)
        module = [sys.executable, "-m", "grpo_trainer"]
        return self.start("trainer", [*module, *options, *self.addresses])


@pytest.fixture
def place(clean_run_api: str, shared_server: InferenceServer, tmp_path: Path) -> Place:
    return Place(tmp_path, clean_run_api, shared_server)


def test_the_atropos_tutorial_lifts_its_reward(upstream: Upstream, place: Place) -> None:
    file = place.directory / "sums_environment.py"
    file.write_text(block(ATROPOS, "python", "SumsEnvironment"))
    _, *words = command(ATROPOS, "sums_environment.py serve", place.replacements)
    trainer = place.trainer(ATROPOS)
    environment = place.start("environment", [upstream.python, *words])
    assert_lifted(place, ATROPOS, trainer, environment)


@pytest.mark.parametrize(
    ("pins", "marker"),
    [("verifiers.txt", "verifiers.v1"), ("verifiers-classic.txt", "load_environment")],
)
def test_the_verifiers_page_lifts_its_reward(pins: str, marker: str, place: Place) -> None:
    python = installed(ROOT / "requirements" / pins).python
    (place.directory / "one_digit_sums.py").write_text(block(VERIFIERS, "python", marker))
    _, *words = command(VERIFIERS, "verifiers:one_digit_sums --model", place.replacements)
    trainer = place.trainer(VERIFIERS)
    environment = place.start(
        "environment", [python, "-m", "grpo_env", *words, *place.addresses], SOURCES
    )
    assert_lifted(place, VERIFIERS, trainer, environment)


def assert_lifted(place: Place, page: str, *processes: ManagedProcess) -> None:
    """Both processes end by themselves, and the trained model gets higher rewards."""
    try:
        codes = [process.wait(DEADLINE_S) for process in processes]
    finally:
        for process in processes:
            process.stop()
    assert codes == [0, 0], "\n".join(process.log_tail() for process in processes)

    options = command(page, "grpo --model")
    steps = int(options[options.index("--steps") + 1])
    lines = (place.directory / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == steps
    assert records[0]["alignment/diff_max"] < NOISE
    base, final = place.server.model, place.directory / "trained_model_checkpoints" / "final_model"
    before, after = accuracy_of(load_model(base), base), accuracy_of(load_model(final), final)
    assert after - before > MIN_LIFT, f"{before:.3f} → {after:.3f}"
