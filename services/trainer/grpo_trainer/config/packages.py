"""Names the packages that some options of `grpo` need."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from grpo_core.settings import Mistake
from grpo_trainer.config.trainer import RunOptions

BITSANDBYTES = "bitsandbytes"
BITSANDBYTES_PIN = "bitsandbytes==0.50.2"
"""As in constraints.txt."""


def missing_packages(options: RunOptions) -> Iterator[Mistake]:
    """One mistake for each option whose package is not installed. Nothing is imported."""
    for field, value, package, source in _needs(options):
        if find_spec(package) is None:
            yield Mistake(field, f"{value}needs the package {package}: {source}")


def _needs(options: RunOptions) -> Iterator[tuple[str, str, str, str]]:
    """Option, its value, the package, and where the package comes from."""
    if options.optimizer == "adamw_8bit":
        yield "optimizer", "adamw_8bit ", BITSANDBYTES, f"pip install {BITSANDBYTES_PIN}"
    if options.tensorboard_dir is not None:
        yield "tensorboard_dir", "", "tensorboard", "pip install tensorboard"
    if options.use_wandb:
        yield "use_wandb", "", "wandb", "pip install wandb"
