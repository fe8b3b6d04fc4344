"""Records on disk, and in experiment trackers: real packages offline, and stand-ins that fail."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from grpo_core.errors import TrackioUnavailable, WandbUnavailable
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer.checkpoint.resume import continued_settings
from grpo_trainer.errors import MetricsNotWritten, NonFiniteLoss
from grpo_trainer.telemetry.rollouts import COLUMNS
from grpo_trainer.telemetry.sinks import (
    append_record,
    open_sinks,
    rotate_records,
    trim_records,
    wandb_sink,
)
from tests.support.directories import names
from tests.support.process_table import is_alive
from tests.support.wait import wait_for
from tests.unit.trainer.groups import group
from tests.unit.trainer.telemetry.step_rollouts import rollouts_of, usable_of

STAND_IN = """
import json, os, time
class Error(Exception):
    pass
def called(*words):
    with open({calls!r}, "a") as file:
        print(json.dumps(words), file=file)
def Settings(**_):
    return None
class Run:
    url, dir = "offline", ""
    def log(self, record, step):
        called("log", record, step)
        {log}
    def finish(self, exit_code):
        called("finish", exit_code)
        {finish}
def init(project, group, name, config, settings):
    called("init", project, group, *(config[name] for name in {named!r}))
    {init}
    return Run()
"""
"""The part of W&B's interface that the child process calls."""
HANG = "time.sleep(600)"
NAMED = {"lr": 0.25, "model": "m", "mode": "shared_vllm", "pause_lease_s": 30.0}
"""Some options of every kind."""


def settings(**changes: Any) -> TrainerSettings:
    values: dict[str, Any] = {
        **{"model": "m", "mode": "shared_vllm", "lr": 0.25},
        **{"keep_rollouts": 0, "use_wandb": True, "wandb_project": "proj", "wandb_group": "grp"},
    }
    return CommandLine(**(values | changes)).settings()


def test_records_are_appended_whole_and_never_hold_nan(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    append_record(path, {"step": 1})
    append_record(path, {"step": 2})
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_record(path, {"step": float("nan")})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_full_disk_is_named_with_the_option() -> None:
    with pytest.raises(MetricsNotWritten, match=r"--metrics-file /dev/full: .* free disk space"):
        append_record(Path("/dev/full"), {"step": 1})


def test_a_resumed_run_keeps_one_line_per_step_that_it_goes_on_from(tmp_path: Path) -> None:
    """The last record counts if a step is there twice; lost steps and incomplete lines go."""
    path, lines = tmp_path / "metrics.jsonl", [f'{{"step": {n}}}\n' for n in range(1, 6)]
    trim_records(path, steps_taken=3)
    assert not path.exists()
    path.write_text("".join(lines) + '{"step": 3, "lr": 2}\n\0\0{"st{"step": 9}\n{"step": 4, "l')
    trim_records(path, steps_taken=3)
    assert path.read_text() == "".join(lines[:2]) + '{"step": 3, "lr": 2}\n'
    assert names(tmp_path) == [path.name]
    for run in ("a", "b"):  # several runs that begin anew in one directory
        path.write_text(run)
        rotate_records(path)
        rotate_records(path)  # a trainer that was killed before its first step
    assert [(tmp_path / f"metrics.jsonl.{n}").read_text() for n in (1, 2)] == ["a", "b"]
    assert len(names(tmp_path)) == 2


def test_every_start_of_a_run_has_the_group_of_wandb_and_the_optimizer_of_the_first() -> None:
    saved: Any = SimpleNamespace(record=SimpleNamespace(wandb_group="first", optimizer="adamw"))
    drawn = settings().model_copy(update={"wandb_group": "drawn"})
    drawn.model_fields_set.discard("wandb_group")
    assert continued_settings(drawn, saved).wandb_group == "first"
    assert continued_settings(settings(), saved).wandb_group == "grp"  # as the user chose
    assert continued_settings(drawn, None) is drawn
    unnamed, named = (drawn.model_copy(update={"optimizer": name}) for name in (None, "adafactor"))
    assert continued_settings(unnamed, saved).optimizer == "adamw"
    assert continued_settings(named, saved).optimizer == "adafactor"


def test_the_real_package_takes_every_record_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    with capture_logs() as logs, open_sinks(settings()) as sinks:
        for step in (1, 2, 3):
            sinks.write({"step": step, f"train/loss_{step}": 0.5})
            sinks.write_rollouts(rollouts_of(usable_of(group()), step=step))
    assert [entry["log_level"] for entry in logs] == ["info"]
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    for word in (b"proj", b"grp", b"train/loss_1", b"train/loss_2", b"train/loss_3"):
        assert word in log.read_bytes()
    (file,) = tmp_path.glob("wandb/offline-run-*/files/media/table/rollouts/samples_1_*.json")
    table = json.loads(file.read_text())
    assert table["columns"] == COLUMNS
    assert table["data"] == [
        [1, "", "", "token ids: 5 6 8 9 10", 0.0, -1.0, ""],
        [1, "", "", "token ids: 5 6 7", 1.0, 1.0, ""],
    ]


class StandIn:
    """A package named wandb, for the child process."""

    def __init__(self, directory: Path) -> None:
        self.packages, self._calls = directory / "packages", directory / "calls"
        self.packages.mkdir()
        self.does()

    def does(self, log: str = "", finish: str = "", init: str = "") -> None:
        text = STAND_IN.format(
            log=log, finish=finish, init=init, calls=str(self._calls), named=list(NAMED)
        )
        (self.packages / "wandb.py").write_text(text)

    @property
    def calls(self) -> list[Any]:
        return [json.loads(line) for line in self._calls.read_text().splitlines()]


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(stand_in.packages), prepend=os.pathsep)
    return stand_in


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_has_the_settings_every_record_and_its_end(
    fails: bool, wandb: StandIn, tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    sent = [{"step": step, "train/loss": 0.5 * step} for step in (1, 2, 3)]
    with suppress(NonFiniteLoss), open_sinks(settings(metrics_file=metrics)) as sinks:
        for record in sent:
            sinks.write(record)
        if fails:
            raise NonFiniteLoss("step 3")
    assert [json.loads(line) for line in metrics.read_text().splitlines()] == sent
    logged = [["log", record, record["step"]] for record in sent]
    begun = ["init", "proj", "grp", *NAMED.values()]
    assert wandb.calls == [begun, *logged, ["finish", int(fails)]]


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ({"log": "os._exit(3)"}, "the process of W&B ended"),
        ({"log": HANG}, "W&B reads no more records"),
        ({"finish": HANG}, "did not finish the run"),
    ],
    ids=["dies", "hangs", "hangs at the end"],
)
def test_wandb_that_fails_is_reported_once_and_training_goes_on(
    does: dict[str, str], why: str, wandb: StandIn
) -> None:
    wandb.does(**does)
    with capture_logs() as logs:
        sink = wandb_sink(settings())
        if "log" in does:
            sink.write({"step": 0})
            wait_for(lambda: wandb.calls[-1][0] == "log")
            wait_for(lambda: does["log"] == HANG or not is_alive(sink.pid))
            for step in range(1, 2001):
                sink.write({"step": step, **{f"metric/{i}": 0.5 for i in range(40)}})
        sink.close(failed=False, deadline_s=0.5 if does.get("finish") == HANG else 60.0)
    (warning,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert warning["event"] == "wandb.failed"
    assert why in warning["reason"]
    assert not is_alive(sink.pid)


def test_a_start_that_fails_says_why_and_what_to_do(wandb: StandIn) -> None:
    wandb.does(init='raise Error("no API key configured")')
    with pytest.raises(WandbUnavailable, match=r"no API key configured.*WANDB_MODE=offline"):
        wandb_sink(settings())


@pytest.mark.usefixtures("wandb")
def test_the_key_in_the_file_reaches_wandb(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    with wandb_sink(settings(wandb_key_file=tmp_path / "key")) as sink:
        assert psutil.Process(sink.pid).environ()["WANDB_API_KEY"] == "s3cret"
    with pytest.raises(WandbUnavailable, match=r"--wandb-key-file .*nowhere"):
        wandb_sink(settings(wandb_key_file=tmp_path / "nowhere"))


def test_trackio_has_every_step_once_though_a_resumed_run_repeats_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is real. A new run in the same directory is another run."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    own = settings(use_wandb=False, report_to=("trackio",), save_path=tmp_path / "my-run")
    for steps_taken, rewards in ((0, (0.1, 0.2, 0.3)), (1, (0.2, 0.3, 0.4)), (0, (0.5,))):
        with open_sinks(own, steps_taken) as sinks:
            for step, reward in enumerate(rewards, steps_taken + 1):
                sinks.write({"step": step, "reward/mean": reward})
    with closing(sqlite3.connect(tmp_path / "trackio/proj.db")) as connection:
        rows = connection.execute("SELECT run_id, run_name, step, metrics FROM metrics ORDER BY id")
        found = [(run, name, step, json.loads(held)) for run, name, step, held in rows]
    (first, *_, second) = [run for run, *_ in found]
    assert first != second
    assert [row for row in found if row[0] == first] == [
        (first, "my-run", step, {"reward/mean": step / 10}) for step in (1, 2, 3, 4)
    ]
    assert [row[3] for row in found if row[0] == second] == [{"reward/mean": 0.5}]


def test_a_trackio_that_does_not_start_says_what_to_do(wandb: StandIn, tmp_path: Path) -> None:
    (wandb.packages / "trackio.py").write_text("raise SystemExit(3)")
    own = settings(use_wandb=False, report_to=("trackio",), save_path=tmp_path)
    with pytest.raises(TrackioUnavailable, match="omit trackio from --report-to"), open_sinks(own):
        pass


def test_tensorboard_has_every_metric_and_a_resumed_run_hides_the_steps_that_it_repeats(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps_taken, rewards in ((0, (0.1, 0.2, 0.3)), (1, (0.4, 0.5))):
        with open_sinks(settings(use_wandb=False, tensorboard_dir=tmp_path), steps_taken) as sinks:
            for step, reward in enumerate(rewards, steps_taken + 1):
                sinks.write({"step": step, "reward/mean": reward, "train/lr": 1e-5})
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in found.Scalars("reward/mean")] == [
        (step, pytest.approx(reward)) for step, reward in ((1, 0.1), (2, 0.4), (3, 0.5))
    ]
    assert len(found.Scalars("train/lr")) == 3
