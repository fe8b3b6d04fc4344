"""Mistakes on the command lines of `grpo-demo` and its siblings, and their YAML."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from grpo_core.settings import load_settings, resolved_yaml
from grpo_local.__main__ import compare, report, run, with_config_of_resumed_run
from grpo_local.__main__ import main as demo
from grpo_local.process.ports import free_port
from grpo_local.run_directory import RunDirectory, create_run_directory
from grpo_local.settings import DemoSettings

PORT = str(free_port())
MISTAKES = {
    demo: {
        "--stesp 3": "--stesp: no such option; did you mean --steps?",
        "3": "'3': unexpected; every option begins with --",
        "--task gsm8k": "gsm8k needs --data (with make: DATA=)",
        "--task gsm8k --data ./none": "--data: no such directory: ./none",
        "--model ./none": "--model: no such directory: ./none",
        "--seq-len 100 --max-model-len 50": "--max-model-len 50 is less than --seq-len 100",
        "--batch-size 50 --group-size 16": "--group-size 16 does not divide the 100 sequences",
        "--max-completion-tokens 128": "--max-completion-tokens 128 leaves no room for a prompt",
        "--log-level LOUD": "--log-level: expected one of DEBUG, INFO, WARNING, ERROR; got 'LOUD'",
        "--mode lora": "expected one of shared_vllm, lora_only, lora_restart, none; got 'lora'",
        "--run-dir /dev": "--run-dir /dev: this path is not an empty directory; name",
        "--resume /dev": "--resume /dev: this directory has no config.yaml; name",
        "--trainer.steps 3": "--trainer.steps: grpo-demo sets this option; write --steps",
        "--server.port 3": "--server.port: grpo-demo sets this option itself; omit it",
        "--trainer.metrics-file m": "--trainer.metrics-file: grpo-demo sets this option itself",
        "--env.env.wandb_name x": "--env.env.wandb-name: grpo-demo sets this option itself",
        "--run-dir a{b}": "--run-dir: the run's id would be 'a{b}', but spaces and braces",
        "--resume --steps 3": "--resume: expected a value after it",
        "--trainer.max-stalenes 3": "did you mean --trainer.max-staleness?",
        "--env.temperature hot": "--env.temperature: expected a number, greater than 0; got 'hot'",
    },
    compare: {
        "--modes none,some": "--modes: expected one of shared_vllm",
        "--side-by-side --gpu-ids 0,1": "--gpu-ids: 2 GPUs for 4 modes; name one GPU for each mode",
        "--gpu-ids 0": "--gpu-ids: this option needs --side-by-side",
        "--run-dir x": "--run-dir: a run of a comparison does not accept this option; omit",
        "--weight-bridge-mode none": "--weight-bridge-mode: a run of a comparison does not accept",
        "-- --seed=5": "--seed: a run of a comparison does not accept this option; write it before",
        "-- --training-steps 5": "--training-steps: a run of a comparison does not accept this",
        "-- --config x": "--config: a run of a comparison does not accept this option; omit it",
        "--directory /dev": "--directory /dev: this path is not an empty directory; name",
        "--modes none -- --lr x": "grpo-compare: --lr: expected a number, greater than 0; got 'x'",
    },
    run: {
        "--training-steps ten": "--training-steps: expected a whole number, at least 1; got 'ten'",
        "--batchsize 30": "--batchsize: no such option; did you mean --batch-size?",
        "--trainer.lr x": "--lr: expected a number, greater than 0; got 'x'",
        "--world-size 2": "--world-size: grpo-run starts one trainer process; omit it",
        "--weights-socket x": "--weights-socket: grpo-run sets this option itself",
        "30": "'30': unexpected; every option begins with --",
        "--stpes 30": "--stpes: no such option",
        "-- --lora_r=8": "--trainer.lora-r: grpo-run sets this option; write --lora-r",
        "-- --weights-socket x": "--weights-socket: grpo-run sets this option itself",
        "--env.seed 3": "--env.seed: grpo-run starts no such service",
        "--server-flags='half": "--server-flags: cannot split the value into words as a shell does",
        f"--health-port {PORT}": f"--port and --health-port are both {PORT}",
    },
}
MISTAKES[report] = {
    "": "RUN is required. Directory of the run",
    "none": "RUN: no such directory: none; name the directory of a run",
    "/dev --output /tmp": "--output: /tmp is a directory; name a file",
    "/dev --output /dev/null/page": "--output: /dev/null is not a directory; choose another path",
}
REQUIRED = {run: ["--model", "m", "--redis-url", "redis://127.0.0.1:1/0", "--port", PORT]}


@pytest.mark.parametrize("command", MISTAKES, ids=["demo", "compare", "run", "report"])
def test_a_mistake_ends_with_status_2_and_names_the_option(
    command: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(command)
    for arguments, problem in MISTAKES[command].items():
        argv = ["command", *REQUIRED.get(command, []), *arguments.split()]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            command()
        said = capsys.readouterr()
        assert (ended.value.code, said.out) == (2, ""), arguments
        assert problem in said.err
        assert said.err.count("\n") == 1


def test_the_resolved_configuration_can_be_read_again(tmp_path: Path) -> None:
    words = [
        "--mode",
        "lora_only",
        "--trainer.lora-layer-indices",
        "0-1",
        "--env.format-reward=0.1",
    ]
    words += ["--server.enable-prefix-caching", "--server.no-await-weights"]
    settings = load_settings(DemoSettings, words)
    config = tmp_path / "config.yaml"
    config.write_text(resolved_yaml(settings.command, settings.resolved()))
    again = load_settings(DemoSettings, ["--config", str(config)])
    assert again.resolved() == settings.resolved()
    assert again.sizes == settings.sizes
    assert again.options_of("server") == {"enable-prefix-caching": (), "no-await-weights": ()}


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
    assert RunDirectory.of(settings.resume) == stopped_run


def test_a_run_that_is_complete_or_still_running_is_not_resumed(
    stopped_run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        resumed("--resume", str(stopped_run.path), "--steps", "4")
    assert "all 4 steps are done; pass a larger --steps" in capsys.readouterr().err
    with stopped_run.hold(), pytest.raises(SystemExit, match="2"):
        resumed("--resume", str(stopped_run.path))
    assert "this run is still running; stop it first" in capsys.readouterr().err


def test_a_renamed_run_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = create_run_directory(tmp_path / "first", seed=0)
    second = RunDirectory(first.path.rename(tmp_path / "second"))
    assert second.run_id == "first"
    (second.path / "run-id").unlink()  # a run of an earlier release
    monkeypatch.chdir(second.path)
    assert RunDirectory.of(Path()).run_id == "second"


def test_a_run_with_secrets_is_resumed_with_secrets(
    stopped_run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    secrets = ["--run-api-token", "a-secret", "--server.hf-token", "another-secret"]
    settings = load_settings(DemoSettings, ["--steps", "6", *secrets])
    stopped_run.write_config(resolved_yaml(settings.command, settings.resolved()))
    with pytest.raises(SystemExit, match="2"):
        resumed("--resume", str(stopped_run.path))
    told = capsys.readouterr().err
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


def test_a_command_without_options_is_a_new_run() -> None:
    assert with_config_of_resumed_run([], {}) == []


def test_help_needs_no_run_to_resume() -> None:
    assert with_config_of_resumed_run(["--resume", "/none", "--help"]) == [
        *("--resume", "/none", "--help")
    ]
