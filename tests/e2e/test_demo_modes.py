"""Every mode learns, as `make compare` runs them: side by side, because one that waits for its
engine leaves a core to the others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grpo_core.handoff import ServerStatus
from grpo_local.modes import MODES, Mode
from tests.e2e.demo_run import DEADLINE_S, NOISE, DemoRun, accuracy_of, load_model, run_command
from tests.e2e.left_over import processes_that_log_below

STEPS = 30
RESTART_EVERY_STEPS = 10
MIN_RISE = 0.03
"""Of the saved model's exact accuracy. Seen: 0.061 to 0.086; one that learns nothing stays at 0."""

pytestmark = [pytest.mark.full, pytest.mark.timeout(2 * DEADLINE_S)]


@dataclass(frozen=True)
class ModeRun(DemoRun):
    mode: Mode

    @property
    def server(self) -> ServerStatus:
        summary: Any = json.loads((self.directory / "summary.json").read_text())
        return ServerStatus.model_validate(summary["server"])


@pytest.fixture(scope="module", params=range(3), ids=lambda seed: f"seed{seed}")
def comparison(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Path,  # noqa: ARG001
) -> Path:
    """Directory of one short run in each mode. They find `tiny_model` in the cache."""
    directory = tmp_path_factory.mktemp("compared") / "modes"
    run_command(
        "grpo_local.compare_command",
        directory,
        *("--side-by-side", "--modes", ",".join(MODES), "--steps", str(STEPS)),
        *("--seed", str(request.param), "--directory", str(directory), "--"),
        *("--vllm-restart-interval", str(RESTART_EVERY_STEPS)),
        *("--gradient-accumulation-steps", "2"),  # as in the demo, in every mode
    )
    return directory


@pytest.fixture(params=MODES)
def run(request: pytest.FixtureRequest, comparison: Path) -> ModeRun:
    output = (comparison / "logs" / f"{request.param}.log").read_text()
    return ModeRun(comparison / request.param, output, MODES[request.param])


def test_after_every_publication_the_server_served_the_new_weights(run: ModeRun) -> None:
    probed = {int(r["step"]): r for r in run.records if "alignment/probe_max" in r}
    assert max(record["alignment/probe_max"] for record in probed.values()) < NOISE
    if not run.mode.shares_memory:  # there it is asked after the first and every tenth
        every = run.mode.publish_every_steps(RESTART_EVERY_STEPS, load_every_steps=1)
        assert set(probed) == {*range(every, STEPS + 1, every), STEPS}
    # With the weights before, the check would have failed.
    assert max(record["alignment/probe_moved"] for record in probed.values()) > 100 * NOISE
    fresh = [r["alignment/diff_max"] for r in run.records if r["staleness/max"] == 0]
    assert all(difference < NOISE for difference in fresh)


def test_the_saved_weights_are_ordinary_ones_and_have_learnt(
    run: ModeRun, tiny_model: Path
) -> None:
    model = base = load_model(tiny_model)
    before = accuracy_of(base, tiny_model)
    final = run.directory / "checkpoints" / run.mode.final_directory
    if run.mode.trains_adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(base, final).eval()
    else:
        model = load_model(final)
    assert accuracy_of(model, tiny_model) - before > MIN_RISE


def test_engines_restart_as_often_as_asked_and_drop_nothing(run: ModeRun) -> None:
    restarts = STEPS // RESTART_EVERY_STEPS if run.mode.restarts_engine else 0
    assert run.server.restarts == restarts
    assert (run.server.dropped_requests, run.server.crashes) == (0, 0)
    assert processes_that_log_below(run.directory / "logs") == []
    assert run.output.count("the engine restarted on the weights of step") == restarts
    said = f"{restarts} engine restart{'' if restarts == 1 else 's'}, 0 dropped requests"
    for words in (f"mode {run.mode.name}: ", said, f"checkpoints/{run.mode.final_directory}"):
        assert words in run.output
