"""The options of a run that is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_core.settings import load_settings, resolved_yaml
from grpo_local.__main__ import with_config_of_resumed_run
from grpo_local.run_directory import RunDirectory, create_run_directory
from grpo_local.settings import DemoSettings
from tests.unit.conftest import Refused


@pytest.fixture
def stopped_run(tmp_path: Path) -> RunDirectory:
    """A run of 6 steps that was stopped after a checkpoint of step 4."""
    run = RunDirectory(tmp_path / "stopped")
    for number, step in ((1, 9), (2, 4)):
        (run.checkpoints / "trainer_state" / f"{number:06}_step_{step}").mkdir(parents=True)
    settings = load_settings(DemoSettings, ["--steps", "6", "--seed", "5", "--lr", "0.25"])
    run.config.write_text(resolved_yaml(settings.command, settings.resolved()))
    (tmp_path / "latest").symlink_to("stopped")
    return run


def resumed(*words: str) -> DemoSettings:
    return load_settings(DemoSettings, with_config_of_resumed_run(words), at_start=True)


def test_a_resumed_run_has_its_options_unless_others_are_given(stopped_run: RunDirectory) -> None:
    latest = stopped_run.path.with_name("latest")
    settings = resumed("--lr", "0.5", "--resume", str(latest))
    assert (settings.sizes.steps, settings.seed, settings.sizes.lr) == (6, 5, 0.5)
    assert settings.resume is not None
    assert RunDirectory.of(settings.resume).path == stopped_run.path


def test_a_run_that_is_complete_or_still_running_is_not_resumed(
    stopped_run: RunDirectory, refused: Refused
) -> None:
    told = refused(resumed, "--resume", str(stopped_run.path), "--steps", "4")
    assert "all 4 steps are done; pass a larger --steps" in told
    with stopped_run.hold():
        told = refused(resumed, "--resume", str(stopped_run.path))
    assert "this run is still running; stop it first" in told


def test_a_renamed_run_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = create_run_directory(tmp_path / "first", seed=0)
    second = RunDirectory(first.path.rename(tmp_path / "second"))
    assert second.run_id == "first"
    (second.path / "run-id").unlink()  # a run of an earlier release
    monkeypatch.chdir(second.path)
    assert RunDirectory.of(Path()).run_id == "second"


def test_a_run_with_secrets_is_resumed_with_secrets(
    stopped_run: RunDirectory, refused: Refused
) -> None:
    secrets = ["--run-api-token", "a-secret", "--server.hf-token", "another-secret"]
    settings = load_settings(DemoSettings, ["--steps", "6", *secrets])
    stopped_run.write_config(resolved_yaml(settings.command, settings.resolved()))
    told = refused(resumed, "--resume", str(stopped_run.path))
    assert "pass --run-api-token again" in told
    assert "pass --server.hf-token again" in told
    resumed("--resume", str(stopped_run.path), *secrets)


def test_a_run_of_smollm2_has_the_sizes_of_a_pretrained_model_and_is_resumed_with_it(
    stopped_run: RunDirectory,
) -> None:
    first = load_settings(DemoSettings, ["--steps", "6", "--model", "smollm2"], at_start=True)
    pretrained = load_settings(DemoSettings, ["--steps", "6", "--model", "owner/name"])
    tiny = load_settings(DemoSettings, ["--steps", "6"])
    assert first.sizes == pretrained.sizes != tiny.sizes
    stopped_run.write_config(resolved_yaml(first.command, first.resolved()))
    assert "\nmodel: smollm2\n" in stopped_run.config.read_text()
    again = resumed("--resume", str(stopped_run.path))
    assert (again.model, again.sizes) == ("smollm2", first.sizes)


def test_help_needs_no_run_to_resume() -> None:
    assert with_config_of_resumed_run(["--resume", "/none", "--help"]) == [
        *("--resume", "/none", "--help")
    ]
