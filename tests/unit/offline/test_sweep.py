"""A job of a sweep that fails is reported and does not end the others."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_offline import __main__ as command
from grpo_offline import loop
from grpo_offline.backends.choice import Sampling
from grpo_offline.errors import RolloutsFail
from grpo_offline.keys import OfflineKeys
from grpo_offline.results import RunResult
from grpo_offline.sweep import __main__ as grpo_sweep

real_run = loop.run_offline


def scored(keys: OfflineKeys, directory: Path, _screen: Any) -> RunResult:
    """Instead of a run: the learning rate is the score, and one of them fails."""
    if keys.train.lr == 2e-5 and keys.train.kl_coef == 0.1:
        raise RolloutsFail("the server ended")
    metrics = [{"task": "t", "mean@1": keys.train.lr * 1e4, "items": 1}]
    return RunResult(directory, 1, 0.1, 0.2, [metrics[0] | {"mean@1": 0.0}], metrics)


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run_offline_grpo.py"])
    monkeypatch.setattr(loop, "run_offline", scored)
    # These would last beyond a test.
    monkeypatch.setattr(command, "configure_logging", lambda *_: None)
    monkeypatch.setattr(command, "share_cores", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)


def test_jobs_are_ranked_and_one_that_fails_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train.lr=[1e-5,2e-5]", "train.kl_coef=[0.05,0.1]"]
    with pytest.raises(SystemExit) as ended:
        command.main(["-m", *words, f"hydra.sweep.dir={tmp_path}/sweep"])
    assert ended.value.code == 1
    jobs = json.loads((tmp_path / "sweep/sweep.json").read_text())["jobs"]
    assert [job["error"] is None for job in jobs] == [True] * 3 + [False]
    scores = [job["score"] for job in jobs[:3]]
    assert scores == sorted(scores, reverse=True)
    assert jobs[0]["overrides"]["train.lr"] == 2e-5
    assert (tmp_path / "sweep/sweep.png").stat().st_size > 0
    said = capfd.readouterr()
    assert said.err.count("RolloutsFail: the server ended") == 1
    assert "HYDRA" not in said.out + said.err
    grpo_sweep.main([str(tmp_path / "sweep")])
    table = capfd.readouterr().out
    assert "train.kl_coef" in table
    assert table.count("failed: RolloutsFail: the server ended") == 1


def test_an_invalid_value_fails_its_job_alone(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["-m", "train.lr=1e-5,-1", f"hydra.sweep.dir={tmp_path}/sweep"])
    assert ended.value.code == 1
    jobs = json.loads((tmp_path / "sweep/sweep.json").read_text())["jobs"]
    assert [job["error"] is None for job in jobs] == [True, False]
    assert "train.lr" in jobs[1]["error"]


def test_a_single_run_ends_with_status_1_and_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["train.lr=2e-5", "train.kl_coef=0.1", f"hydra.run.dir={tmp_path}/run"])
    assert ended.value.code == 1
    assert "grpo-offline: RolloutsFail: the server ended" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["train.lr=-1", "grpo.lr=1"])
def test_an_invalid_value_ends_a_single_run_with_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setattr(loop, "run_offline", real_run)
    monkeypatch.setattr(loop, "choose", lambda _: Sampling("local", "local"))
    with pytest.raises(SystemExit) as ended:
        command.main([word, f"hydra.run.dir={tmp_path}/run"])
    assert ended.value.code == 2


def test_several_ranks_need_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as ended:
        command.main([])
    assert ended.value.code == 2


def test_a_directory_without_jobs_is_no_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        grpo_sweep.main([str(tmp_path)])
    assert "holds no jobs" in capsys.readouterr().err
