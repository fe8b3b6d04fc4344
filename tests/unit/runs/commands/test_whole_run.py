"""`grpo-demo` as a user runs it, with a real Redis and stand-ins for the other services; the
options of a run that is resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest

from grpo_core.errors import GrpoError
from grpo_core.process import ProcessFailed
from grpo_core.settings import load_settings, resolved_yaml
from grpo_runs.__main__ import with_config_of_resumed_run
from grpo_runs.commands import whole_run
from grpo_runs.commands.whole_run import NoTrainingStep, follow_training, run_whole
from grpo_runs.defaults import SIZE_NAMES
from grpo_runs.process.stack import Stack, StopRequest
from grpo_runs.report.evaluations import EvaluationsFile
from grpo_runs.report.steps import MetricsFile
from grpo_runs.report.summary import RunFacts, WholeRun, read_record
from grpo_runs.run_directory import RunDirectory, create_run_directory
from grpo_runs.settings.run import DEMO_FILE, DemoSettings, RunSettings
from tests.support.process_table import SLEEP, is_alive, unrelated_process
from tests.support.wait import wait_for
from tests.unit.conftest import Refused
from tests.unit.core.rollouts.test_page import data_of
from tests.unit.runs.records import metrics_line
from tests.unit.runs.stand_ins import Shown, script, write_stand_ins

ENVIRONMENTS = ["environment-arithmetic", "environment-gsm8k"]
SERVICES = ["redis", "run-api", "vllm-server", "trainer", *ENVIRONMENTS]
LAST_SERVICE = "environment"


@dataclass(frozen=True)
class Demo:
    """`grpo-demo` in an empty working directory."""

    folder: Path
    process: subprocess.Popen[str]

    def finish(self) -> tuple[int, str, str]:
        """Exit status, stdout, stderr."""
        out, err = self.process.communicate(timeout=180)
        return self.process.returncode, out, err

    @property
    def pids(self) -> Path:
        return self.folder / "pids"

    def all_ended(self) -> bool:
        return not any(is_alive(int(path.read_text())) for path in self.pids.iterdir())

    def wait_for_steps(self) -> None:
        metrics = self.folder / "run" / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and (self.pids / LAST_SERVICE).exists())


@contextmanager
def started(folder: Path, *arguments: str, **environment: str) -> Iterator[Demo]:
    write_stand_ins(folder / "stand-ins")
    for name in ("pids", "tmp", "data"):
        (folder / name).mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "grpo_runs", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(folder / "stand-ins"), os.environ.get("PYTHONPATH", "")]
            ),
            "STAND_IN_PIDS": str(folder / "pids"),
            "TMPDIR": str(folder / "tmp"),
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Demo(folder, process)
    finally:
        process.kill()
        process.communicate()


@dataclass(frozen=True)
class Finished:
    demo: Demo
    status: int
    out: str
    err: str

    @property
    def run(self) -> RunDirectory:
        return RunDirectory((self.demo.folder / "runs" / "latest").resolve())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """25 steps on two tasks."""
    flags = ("--task", "arithmetic,gsm8k", "--data", "data", "--seq-len", "2000", "--steps", "25")
    flags += ("--on-end", "tee end.json")
    flags += ("--seed", "4")
    with started(tmp_path_factory.mktemp("demo"), *flags, STAND_IN_WARNS="1") as demo:
        return Finished(demo, *demo.finish())


def test_every_service_starts_and_ends_and_leaves_its_log(finished: Finished) -> None:
    assert finished.status == 0
    ready = [line.split()[0] for line in finished.out.splitlines() if " ready after " in line]
    assert ready == ["redis", "model", *SERVICES[1:]]
    assert {path.stem for path in finished.run.logs.iterdir()} == {"model", *SERVICES}
    assert "loading stand-in-model " in (finished.run.logs / "vllm-server.log").read_text()
    assert finished.demo.all_ended()
    assert list((finished.demo.folder / "tmp").iterdir()) == []


def test_every_step_is_shown_and_summed_up(finished: Finished) -> None:
    lines = finished.out.splitlines()
    assert "\x1b" not in finished.out
    steps = [line.split()[0] for line in lines if "/25 " in line]
    assert steps == [f"{step}/25" for step in range(1, 26)]
    # rewards 0.04, 0.08, ... 1.0; a tenth of 25 steps is 2
    assert "reward:   0.060 in the first 2 steps, 0.980 in the last 2 steps (mean)" in lines
    assert (finished.run.path / "reward.png").stat().st_size > 5_000


def test_crashes_of_the_engine_are_counted(finished: Finished) -> None:
    assert (
        "weights:  25 publications, 5 engine restarts, 3 of them not planned (the engine crashed), "
        "0 dropped requests"
    ) in finished.out.splitlines()


def test_a_warning_of_a_service_is_shown_once_and_counted_at_the_end(finished: Finished) -> None:
    assert finished.err == 2 * "warning: trainer loss.sign: hint=minus\n", "the end repeats it"
    assert "warnings: trainer loss.sign (2 times)" in finished.out.splitlines()
    assert read_record(RunFacts, finished.run.summary).warnings == {"trainer loss.sign": 2}
    content = data_of(finished.run.report)["content"]
    assert ["Warnings", "trainer loss.sign (2 times)"] in content["facts"]


def test_the_summary_counts_dropped_and_lost_groups(finished: Finished) -> None:
    line = "groups:   4 submitted; 204 dropped, all scores equal (98 %); 1 lost"
    assert line in finished.out.splitlines()


def test_the_end_is_told(finished: Finished) -> None:
    told = json.loads((finished.demo.folder / "end.json").read_text())
    name = finished.run.path.name
    assert (told["event"], told["state"], told["run"]) == ("end", "completed", name)
    assert (told["step"], told["last_step"]) == (25, 25)
    assert told["text"].startswith(f"run {name} completed: mean reward 0.060 to 0.980")
    assert "end.json" not in finished.run.config.read_text()


def test_evaluations_are_shown(finished: Finished) -> None:
    lines = [line.strip() for line in finished.out.splitlines()]
    shown = [line for line in lines if line.startswith("evaluation of arithmetic")]
    between = "(0.200 to 0.400), 20 held-out items x 8, 0.5 s"
    assert shown == [
        f"evaluation of arithmetic after 0 steps: pass@1 0.300 {between}",
        f"evaluation of arithmetic after 25 steps: pass@1 0.750 {between}",
    ]


def test_other_programs_can_read_what_the_run_took(finished: Finished) -> None:
    facts = read_record(RunFacts, finished.run.summary)
    assert (facts.mode, facts.seed, facts.summary.steps) == ("shared_vllm", 4, 25)
    assert facts.benchmark is not None
    assert facts.benchmark.publishes == 25
    (server,) = facts.servers
    assert (server.restarts, server.dropped_requests) == (5, 0)
    assert server.generation_tokens == 5000
    assert set(facts.peak_bytes) >= set(SERVICES[:-1])
    assert len(MetricsFile(finished.run.metrics).read_new()) == 25


def test_every_task_has_an_environment_of_its_own(finished: Finished) -> None:
    for name in ENVIRONMENTS:
        said = (finished.run.logs / f"{name}.log").read_text()
        assert said.startswith(f"{name.removeprefix('environment-')} serve ")
        assert "--seq-len 2000 " in said
    assert "--data data" in said


def test_a_run_goes_on_without_a_server_that_died(tmp_path: Path) -> None:
    flags = ("--mode", "none", "--servers", "3", "--steps", "2", "--run-dir", "run")
    with started(tmp_path, *flags, STAND_IN_KILLED="server-1") as demo:
        status, out, err = demo.finish()
        assert status == 0, err
        assert demo.all_ended()
    lost = "warning: server-1 ended with SIGKILL; the run goes on with the others; see run/logs/"
    assert [line for line in err.splitlines() if "server-1" in line] == [f"{lost}server-1.log"]
    assert (
        "servers:  2 of 3, policy version [1, 1]; 1 late publication; 2 repeated announcements; "
        "4 unanswered checks; 1 server left; server-1 ended with SIGKILL"
    ) in out.splitlines()
    assert "weights:  2 publications, 10 engine restarts, 6 of them not planned" in out
    facts = read_record(RunFacts, tmp_path / "run" / "summary.json")
    assert [server.name for server in facts.servers] == ["server-0", "server-2"]
    assert facts.ended_servers == {"server-1": "SIGKILL"}
    assert facts.warnings == {"grpo-run ServiceEnded": 1}
    summary = facts.summary
    assert (summary.servers_left, summary.repeated_announcements, summary.unanswered_checks) == (
        *(1, 2, 4),
    )


def test_a_stop_signal_ends_all_that_was_started_and_nothing_else(tmp_path: Path) -> None:
    flags = ("--run-dir", "run", "--on-end", "tee end.json", "--on-alert", "false")
    with (
        unrelated_process() as bystander,
        started(tmp_path, *flags, STAND_IN_TRAINER_LINGERS="1", STAND_IN_WARNS="1") as demo,
    ):
        demo.wait_for_steps()
        before_a_step = tmp_path / "run/checkpoints/trainer_state/000001_step_0"
        before_a_step.mkdir(parents=True)
        demo.process.send_signal(signal.SIGTERM)
        status, _, err = demo.finish()
        assert status == 143
        shown, *told, advice = err.splitlines()
        assert shown == "warning: trainer loss.sign: hint=minus"
        assert told == [
            "stopped by SIGTERM; every process of this run has ended",
            shown,
            "groups: 4 submitted; 204 dropped, all scores equal (98 %); 1 lost",
            "warnings: trainer loss.sign (2 times)",
            "logs of all services: run/logs",
        ]
        assert advice.startswith("this run has no checkpoint of a step yet")
        assert demo.all_ended()
        assert is_alive(bystander.pid)
        end = json.loads((tmp_path / "end.json").read_text())
        assert (end["state"], end["text"]) == ("stopped", "run run stopped: stopped by SIGTERM")


@pytest.mark.parametrize(
    ("code", "deadline_s", "environment", "error", "told"),
    [
        (SLEEP, 0.1, SLEEP, NoTrainingStep, r"no training step ended within 0\.1 s, after 2 of 5"),
        ("", 300.0, SLEEP, ProcessFailed, r"trainer ended with status 0 after 2 of 5 steps; see"),
        # A model's program may call `os._exit(0)` in a task.
        (
            *(SLEEP, 300.0, "import os; os._exit(0)", ProcessFailed),
            "environment ended with status 0 before the run was complete",
        ),
        (SLEEP, 1.0, "print('run.completed')", NoTrainingStep, "no training step"),
    ],
    ids=["no step", "the trainer ends", "an environment ends", "the environment is done"],
)
def test_a_run_that_does_not_go_on_is_named(
    code: str,
    deadline_s: float,
    environment: str,
    error: type[GrpoError],
    told: str,
    tmp_path: Path,
) -> None:
    """A trainer has taken 2 of 5 steps and runs `code`, beside an environment."""
    run = RunDirectory(tmp_path)
    run.metrics.write_text(metrics_line(1) + metrics_line(2))
    settings = load("--steps", "5", "--step-deadline-s", str(deadline_s))
    run.logs.mkdir()
    (run.logs / "environment.log").write_text("run.completed, in an earlier part\n")
    whole = WholeRun(settings, run, Shown(), EvaluationsFile(run.evaluations))
    with StopRequest() as request, Stack(run.logs, request) as stack:
        programs = {"trainer": code, "environment": environment}
        stack.start([script(name, text, may_finish=True) for name, text in programs.items()])
        with pytest.raises(error, match=told):
            follow_training(whole, stack)


def test_steps_that_ranks_repeat_after_their_restart_count_once(tmp_path: Path) -> None:
    """The second and the third step were taken after the newest checkpoint."""
    run, shown = RunDirectory(tmp_path), Shown()
    old = [metrics_line(step) for step in (1, 2, 3)]
    new = [metrics_line(1), *(metrics_line(step, **{"reward/mean": 9.0}) for step in (2, 3, 4))]
    run.metrics.write_text("".join(old))
    run.logs.mkdir()

    class Restarting(Shown):
        def line(self, text: str, style: str | None = None) -> None:
            shown.line(text, style)
            if text.split()[:1] == ["3/40"] and " 9.000 " not in text:
                run.metrics.write_text("".join(new))
                (tmp_path / "done").touch()

    whole = WholeRun(load("--steps", "4"), run, Restarting(), EvaluationsFile(run.evaluations))
    ends = f"import pathlib\nwhile not pathlib.Path({str(tmp_path / 'done')!r}).exists(): pass"
    with StopRequest() as request, Stack(run.logs, request) as stack:
        programs = {"trainer": ends, "environment": SLEEP}
        stack.start([script(name, text, may_finish=True) for name, text in programs.items()])
        records = follow_training(whole, stack)
    assert [(one.step, one.reward_mean) for one in records] == [(1, 0.1), (2, 9), (3, 9), (4, 9)]
    steps = [line.split()[0] for line in shown.out.splitlines() if "/40" in line]
    assert steps == ["1/40", "2/40", "3/40", "2/40", "3/40", "4/40"]


def load(*words: str, at_start: bool = False) -> RunSettings:
    return load_settings(DemoSettings, words, {}, at_start=at_start, below=DEMO_FILE)


def test_latest_follows_runs_in_the_default_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    create_run_directory(None, seed=3)
    second = create_run_directory(Path("runs/second"), seed=3)
    assert Path("runs/latest").resolve() == second.path.resolve()


def test_a_directory_that_was_used_since_the_check_is_refused(tmp_path: Path) -> None:
    settings, shown = load(*["--run-dir", str(tmp_path)]), Shown()
    (tmp_path / "config.yaml").touch()
    assert run_whole(settings, shown) == 1
    expected = f"failed (RunDirectoryUnusable): --run-dir {tmp_path}: this directory holds"
    assert shown.err.startswith(expected)
    assert shown.out == ""


def test_a_resume_that_fails_leaves_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_run_directory(tmp_path / "run", seed=0)
    run.config.write_text("seed: 1\n")
    failure = ProcessFailed("redis ended with status 1")
    monkeypatch.setattr(whole_run, "start_services", Mock(side_effect=failure))
    told = tmp_path / "told"
    settings = load(*["--resume", str(run.path), "--seed", "2", "--on-end", f"tee {told}"])
    assert run_whole(settings, Shown()) == 1
    assert "failed: ProcessFailed: redis ended" in json.loads(told.read_text())["text"]
    assert run.config.read_text() == "seed: 1\n"


@pytest.fixture
def stopped_run(tmp_path: Path) -> RunDirectory:
    """A run of 6 steps that was stopped after a checkpoint of step 4."""
    run = RunDirectory(tmp_path / "stopped")
    for number, step in ((1, 9), (2, 4)):
        (run.checkpoints / "trainer_state" / f"{number:06}_step_{step}").mkdir(parents=True)
    settings = load(*["--steps", "6", "--seed", "5", "--lr", "0.25"])
    run.config.write_text(resolved_yaml(settings.command, settings.resolved()))
    (tmp_path / "latest").symlink_to("stopped")
    return run


def resumed(*words: str) -> RunSettings:
    given = with_config_of_resumed_run(DemoSettings.command, words)
    return load(*given, at_start=True)


def test_a_resumed_run_has_its_options_unless_others_are_given(stopped_run: RunDirectory) -> None:
    latest = stopped_run.path.with_name("latest")
    settings = resumed("--lr", "0.5", "--resume", str(latest))
    assert (settings.steps, settings.seed, settings.lr) == (6, 5, 0.5)
    assert settings.resumed is not None
    assert RunDirectory.of(settings.resumed).path == stopped_run.path


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
    settings = load(*["--steps", "6", *secrets])
    stopped_run.write_config(resolved_yaml(settings.command, settings.resolved()))
    told = refused(resumed, "--resume", str(stopped_run.path))
    assert "pass --run-api-token again" in told
    assert "pass --server.hf-token again" in told
    resumed("--resume", str(stopped_run.path), *secrets)


def test_a_run_of_smollm2_has_the_sizes_of_a_pretrained_model_and_is_resumed_with_it(
    stopped_run: RunDirectory,
) -> None:
    first = load(*["--steps", "6", "--model", "smollm2"], at_start=True)
    pretrained = load(*["--steps", "6", "--model", "owner/name"])
    tiny = load(*["--steps", "6"])
    assert sizes(first) == sizes(pretrained) != sizes(tiny)
    stopped_run.write_config(resolved_yaml(first.command, first.resolved()))
    assert "model:\n  name: smollm2\n" in stopped_run.config.read_text()
    again = resumed("--resume", str(stopped_run.path))
    assert (again.model, sizes(again)) == ("smollm2", sizes(first))


def sizes(settings: RunSettings) -> list[object]:
    return [getattr(settings, name) for name in SIZE_NAMES]


def test_settings_hold_what_the_run_uses_and_tell_what_was_given() -> None:
    settings = load(*["--mode", "lora_only", "--steps", "9"])
    assert (settings.lr, settings.batch_size, settings.steps) == (6 * 3e-4, 64, 9)
    assert {"lr", "batch_size", "steps"} & settings.model_fields_set == {"steps"}


def test_help_needs_no_run_to_resume() -> None:
    assert with_config_of_resumed_run(DemoSettings.command, ["--resume", "/none", "--help"]) == [
        *("--resume", "/none", "--help")
    ]
