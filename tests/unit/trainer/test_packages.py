"""Packages of single options are required before anything is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from grpo_trainer import loop
from grpo_trainer.errors import MissingPackage
from grpo_trainer.packages import BITSANDBYTES_PIN, LIGER_PIN, require_packages
from grpo_trainer.settings import TrainerSettings, parse_settings

ROOT = Path(__file__).parents[3]
NEEDS = [
    (("--optimizer", "adamw_8bit"), "bitsandbytes", f"pip install {BITSANDBYTES_PIN}"),
    (("--fused-step",), "triton", "CUDA builds of torch for Linux bring it"),
    (("--head-kernel", "liger"), "liger_kernel", f"pip install {LIGER_PIN}"),
    (("--use-wandb", "--wandb-project", "p"), "wandb", "pip install wandb"),
]


def settings(*flags: str) -> TrainerSettings:
    always = ("--model-name", "m", "--weight-bridge-mode", "shared_vllm")
    return parse_settings([*always, *flags])


def leave_out(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize(("flags", "package", "source"), NEEDS)
def test_a_missing_package_stops_the_run_before_anything_else(
    flags: tuple[str, ...],
    package: str,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    leave_out(monkeypatch, package)
    with pytest.raises(MissingPackage) as missing:
        loop.train(settings(*flags, "--save-path", str(tmp_path / "unused")))
    assert str(missing.value).endswith(f" needs {package}: {source}")
    assert str(missing.value).startswith(flags[0])
    assert not (tmp_path / "unused").exists()


def test_all_missing_packages_are_named_at_once_and_no_unneeded_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leave_out(monkeypatch, *(package for _, package, _ in NEEDS))
    chosen = [word for flags, _, _ in NEEDS[2:] for word in flags]
    with pytest.raises(
        MissingPackage, match=r"liger_kernel: .*; --use-wandb needs wandb: "
    ) as told:
        require_packages(settings(*chosen))
    assert "bitsandbytes" not in str(told.value)
    require_packages(settings())


def test_the_install_lines_name_the_versions_that_are_tested() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert {BITSANDBYTES_PIN, LIGER_PIN} <= set(pins)
