"""Compiles each decoder layer with torch.compile: one short compilation serves all equal layers.

The modules and their parameters stay the same objects. Views into shared memory keep their
addresses, and gradient hooks still run.
"""

from __future__ import annotations

import os
import shutil

import torch

from grpo_trainer.errors import FastPathRefused, MissingPackage
from grpo_trainer.model.layers import layers_of
from grpo_trainer.model.policy_protocol import CausalLM

_COMPILERS = {"cpu": ("CXX", "g++", "clang++"), "cuda": ("CC", "gcc", "clang")}
"""For each type of device: the variable that names a compiler, and the names to look for without
it. On a GPU, Triton compiles kernels, and a C compiler compiles the code that launches them."""


def require_compiler(device: torch.device) -> None:
    """Raises `MissingPackage` if torch.compile would fail in the first step."""
    variable, *names = _COMPILERS[device.type]
    candidates = [os.environ[variable]] if os.environ.get(variable) else names
    if not any(shutil.which(name) for name in candidates):
        raise MissingPackage(
            f"--compile needs a compiler on {device.type}, but there is no "
            f"{' or '.join(candidates)}: run apt-get install build-essential, name a compiler "
            f"in ${variable}, or omit --compile"
        )


def compile_layers(model: CausalLM, backend: str = "inductor") -> None:
    """Compile the model's layers when they are first called.

    Args:
        model: the transformers model, without an adapter's wrapper
        backend: of torch.compile

    Raises:
        FastPathRefused: the model has no list of layers.
    """
    layers = layers_of(model)
    if layers is None:
        raise FastPathRefused(
            f"--compile: {type(model).__name__} has no list of layers; omit --compile"
        )
    for layer in layers:
        # Dynamic shapes, because lengths differ between batches: one compilation serves all of
        # them.
        layer.compile(dynamic=True, backend=backend)
