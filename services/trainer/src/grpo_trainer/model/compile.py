"""torch.compile of each decoder layer: one short compilation for all of them, as they are alike.

The modules and their parameters stay what they are: views into shared memory keep their addresses,
and gradient hooks fire.
"""

from __future__ import annotations

import os
import shutil

import torch
from torch import nn

from grpo_trainer.errors import FastPathRefused, MissingPackage
from grpo_trainer.model.policy_protocol import CausalLM

_COMPILERS = {"cpu": ("CXX", "g++", "clang++"), "cuda": ("CC", "gcc", "clang")}
"""By the type of the device: the variable that names one, and what is looked for without it. On a
GPU kernels are compiled by Triton, and the code that launches them by a C compiler."""


def require_compiler(device: torch.device) -> None:
    """Raises `MissingPackage` where torch.compile would fail in the first step."""
    variable, *names = _COMPILERS[device.type]
    candidates = [os.environ[variable]] if os.environ.get(variable) else names
    if not any(shutil.which(name) for name in candidates):
        raise MissingPackage(
            f"--compile needs a compiler on {device.type}, and there is no "
            f"{' or '.join(candidates)}: apt-get install build-essential, name one in "
            f"${variable}, or leave --compile out"
        )


def compile_layers(model: CausalLM, backend: str = "inductor") -> None:
    """Have the model's layers compiled when they are first called.

    Args:
        model: as transformers made it, without an adapter's wrapper
        backend: of torch.compile

    Raises:
        FastPathRefused: the model has no list of layers.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise FastPathRefused(
            f"--compile: {type(model).__name__} has no list of layers; leave --compile out"
        )
    for layer in layers:
        # Lengths differ from batch to batch: one compilation for all of them.
        layer.compile(dynamic=True, backend=backend)
