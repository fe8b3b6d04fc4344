"""Whatever is damaged of a trainer's --save-path, resume, replay and provenance end in words."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.errors import GrpoError
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_runs.offline.local import WeightsInProcess
from grpo_runs.replay.__main__ import main as replay
from grpo_runs.replay.provenance import main as provenance
from grpo_trainer.checkpoint.store import OpenedEpochs
from grpo_trainer.train import open_run
from tests.support.damage import damaged, damages
from tests.unit.bad_input.commands import nothing_left, told
from tests.unit.runs.replay.recorded import FIXED, STEPS
from tests.unit.trainer.ranks.test_loop import Queue

EXAMPLES = settings.default.max_examples // 20
COMMANDS = {
    "grpo-provenance": (provenance, ()),
    "grpo-replay": (replay, ("--step", STEPS)),
    "grpo-replay of another objective": (replay, ("--step", STEPS, "--objective", "dapo")),
}


def files_of(trained: Path, *patterns: str) -> list[Path]:
    return sorted(path for one in patterns for path in trained.glob(one))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_names_what_does_not_fit(
    trained: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_runs.replay.__main__.configure_logging", lambda *_: None)
    monkeypatch.setattr("grpo_runs.replay.__main__.prepare_cpu", lambda: None)
    main, options = COMMANDS[name]
    words = [trained, *options]
    assert told(main, words).status == 0
    files = files_of(trained, "*.jsonl", "batches/*", "trainer_state/*/*", "final_model/*")

    @settings(max_examples=EXAMPLES)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(files))
        with damaged(path, data.draw(damages(path))), nothing_left(trained):
            found = told(main, words)
        assert not found.status or found.err or "not" in found.out

    check()


def test_a_run_resumes_or_names_the_checkpoint(model: Path, trained: Path) -> None:
    newest = files_of(trained, "trainer_state/*_step_*")[-1]
    OpenedEpochs(trained).open(2)
    files = files_of(trained, "trainer_state/newest_epoch", f"trainer_state/{newest.name}/*")
    assert resumed(model, newest) is None

    @settings(max_examples=2 * EXAMPLES)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(files))
        with damaged(path, data.draw(damages(path))), nothing_left(trained):
            problem = resumed(model, newest)
        assert problem is None or path.name in problem or newest.name in problem

    check()


def resumed(model: Path, checkpoint: Path) -> str | None:
    """The error that ends a trainer before its first step; None if it has begun."""
    queue: Any = Queue()
    with tempfile.TemporaryDirectory() as save_path:
        given = {**FIXED, "mode": "none", "model": str(model), "save_path": Path(save_path)}
        given |= {"resume": str(checkpoint), "steps": STEPS + 1}
        try:
            with open_run(CommandLine.model_validate(given).settings(), queue, weights):
                return None
        except GrpoError as error:
            assert not queue.given, "the run at run-api was changed"
            return str(error)


@contextlib.contextmanager
def weights(settings: TrainerSettings) -> Iterator[WeightsInProcess]:
    yield WeightsInProcess(settings, samples=True)
