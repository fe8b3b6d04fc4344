"""Packages that single options need."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from grpo_trainer.config.forward import LIGER
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.errors import MissingPackage

BITSANDBYTES_PIN = "bitsandbytes==0.50.2"
LIGER_PIN = "liger-kernel==0.8.5"
"""As in constraints.txt."""


def require_packages(settings: TrainerSettings) -> None:
    """Before anything is started; what needs no package is not looked for.

    Raises:
        MissingPackage: options need packages that are not installed; names all of them.
    """
    missing = [
        f"{option} needs {package}: {source}"
        for option, package, source in _needs(settings)
        if find_spec(package) is None
    ]
    if missing:
        raise MissingPackage("; ".join(missing))


def _needs(settings: TrainerSettings) -> Iterator[tuple[str, str, str]]:
    """Option, package, and where that comes from."""
    if settings.optimizer == "adamw_8bit":
        yield "--optimizer adamw_8bit", "bitsandbytes", f"pip install {BITSANDBYTES_PIN}"
    if settings.fused_step:
        yield "--fused-step", "triton", "CUDA builds of torch for Linux bring it"
    if settings.head_kernel == LIGER:
        yield "--head-kernel liger", "liger_kernel", f"pip install {LIGER_PIN}"
    if settings.use_wandb:
        yield "--use-wandb", "wandb", "pip install wandb"
