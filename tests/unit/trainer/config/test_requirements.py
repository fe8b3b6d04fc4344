"""Packages and the model are checked before any process starts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_core.errors import ModelNotFound
from grpo_core.settings import load_settings
from grpo_core.tree.optim import BITSANDBYTES_PIN
from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer.errors import MissingPackage
from grpo_trainer.model.download import provide
from grpo_trainer.optim.master_update import build_update
from tests.support.directories import names

TRAINER = ["--model", "m", "--mode", "shared_vllm"]


def test_missing_packages_are_all_named_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("bitsandbytes", "tensorboard", "trackio"):
        monkeypatch.setitem(sys.modules, package, None)
    flags = ["--optimizer", "adamw_8bit", "--tensorboard-dir", str(tmp_path / "board")]
    flags += ["--report-to", "trackio"]
    unused = tmp_path / "unused"
    words = [*TRAINER, *flags, "--save-path", str(unused)]
    with pytest.raises(SystemExit):
        load_settings(CommandLine, words, at_start=True)
    assert capsys.readouterr().err.splitlines() == [
        "grpo: --optimizer: adamw_8bit needs the package bitsandbytes: "
        f"pip install {BITSANDBYTES_PIN}",
        "grpo: --tensorboard-dir: needs the package tensorboard: pip install tensorboard",
        "grpo: --report-to: trackio needs the package trackio: pip install trackio",
    ]
    assert not unused.exists()
    pins = (Path(__file__).parents[4] / "requirements/constraints.txt").read_text().splitlines()
    assert BITSANDBYTES_PIN in pins


def test_a_gpu_without_bitsandbytes_gets_no_other_optimizer_quietly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    settings = load_settings(CommandLine, TRAINER, at_start=True).settings()
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(MissingPackage, match=f"run pip install {BITSANDBYTES_PIN}"):
        build_update(settings, [on_gpu])


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_directory_without_a_model_is_refused_and_left_as_it_is(
    name: str, tmp_path: Path
) -> None:
    if name == "empty":
        (tmp_path / name).mkdir()
    before = names(tmp_path)
    with pytest.raises(ModelNotFound, match=r"has no config.json; name a directory with a model"):
        provide(str(tmp_path / name))
    assert names(tmp_path) == before
