"""Adds a LoRA adapter (arXiv 2106.09685) to a frozen model."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from grpo_core.tree.weights import LoraOptions
from grpo_core.weights.directory_checks import LORA_RANKS
from grpo_trainer.errors import PolicyMismatch
from grpo_trainer.model.policy import CausalLM, text_config_of

_DROPOUT = ".lora_dropout."
ALL_LINEAR = "all-linear"
"""Stands for all linear layers of the model, as in peft."""


def with_adapter(model: CausalLM, lora: LoraOptions) -> CausalLM:
    """Freeze `model` and add an adapter that changes nothing yet (B = 0).

    The adapter is in the model's data type, as in the server, so both compute with the same
    numbers. Small updates are not lost, because its master weights are in float32.

    Raises:
        PolicyMismatch: the model has no such modules or layers; lists all of them.
    """
    from peft import LoraConfig, get_peft_model

    _require_places(model, lora)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=_targets(model, lora.target_modules),
        layers_to_transform=None if lora.layers is None else list(lora.layers),
        bias="none",
    )
    adapted: CausalLM = get_peft_model(model, config, autocast_adapter_dtype=False)
    return adapted


def served_rank(r: int) -> int:
    """The smallest --max-lora-rank of vLLM that accepts an adapter of rank `r`.

    Raises:
        PolicyMismatch: there is none.
    """
    enough = [rank for rank in LORA_RANKS if rank >= r]
    if not enough:
        raise PolicyMismatch(f"--lora-r {r}: vLLM serves adapters only up to rank {LORA_RANKS[-1]}")
    return enough[0]


def dropout_on(dropouts: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Switch dropout on inside the block only: a comparison with the server must not be random."""
    return _switched(dropouts, is_on=True)


def without_dropout(policy: CausalLM) -> AbstractContextManager[None]:
    """Switch all dropout off inside the block, whatever it was before."""
    active = [m for m in policy.modules() if isinstance(m, nn.Dropout) and m.training]
    return _switched(active, is_on=False)


@contextlib.contextmanager
def _switched(modules: Sequence[nn.Module], is_on: bool) -> Iterator[None]:
    for module in modules:
        module.train(is_on)
    try:
        yield
    finally:
        for module in modules:
            module.train(not is_on)


@contextlib.contextmanager
def adapter_scaled(policy: CausalLM, factor: float, layer: str = "") -> Iterator[None]:
    """Multiply the adapter's part of every layer, or of one, by `factor` inside the block. Changes
    nothing without an adapter."""
    found: list[Any] = [
        getattr(module, "scaling", None)
        for name, module in policy.named_modules()
        if f"{name}.".startswith(f"{layer}." if layer else "")
    ]
    scalings: list[dict[str, float]] = [scaling for scaling in found if isinstance(scaling, dict)]
    before = [dict(scaling) for scaling in scalings]
    for scaling in scalings:
        scaling.update({name: factor * value for name, value in scaling.items()})
    try:
        yield
    finally:
        for scaling, values in zip(scalings, before, strict=True):
            scaling.update(values)


def adapted_layers(policy: CausalLM) -> list[str]:
    """Names of the decoder layers that the adapter changes; none without one."""
    names = (re.match(r".*\.layers\.\d+(?=\.)", name) for name in trained_parameters(policy))
    has_adapter = any(isinstance(getattr(m, "scaling", None), dict) for m in policy.modules())
    return list(dict.fromkeys(found[0] for found in names if found)) if has_adapter else []


def adapter_dropouts(policy: CausalLM) -> list[nn.Dropout]:
    """The adapter's dropout modules, if active. The model's own dropout stays off, because the
    server has none."""
    return [
        module
        for name, module in policy.named_modules()
        if _DROPOUT in f".{name}." and isinstance(module, nn.Dropout) and module.p > 0
    ]


def trained_parameters(policy: CausalLM) -> dict[str, nn.Parameter]:
    """The trained parameters by name, in the order of the optimizer's master weights."""
    return {name: p for name, p in policy.named_parameters() if p.requires_grad}


def _targets(model: CausalLM, names: Sequence[str]) -> list[str]:
    """The names of the modules; for `all-linear`, those of all linear layers but the head."""
    return _linear_layers(model) if [*names] == [ALL_LINEAR] else [*names]


def _linear_layers(model: CausalLM) -> list[str]:
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    linear = (
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    )
    return [*dict.fromkeys(linear)]


def _require_places(model: CausalLM, lora: LoraOptions) -> None:
    leaves = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    layers = int(text_config_of(model).num_hidden_layers)
    problems = []
    targets = _targets(model, lora.target_modules)
    if missing := [name for name in targets if name.rpartition(".")[2] not in leaves]:
        problems.append(
            f"--lora-target-modules: the model has no modules {', '.join(missing)}; its linear "
            f"layers are {', '.join(_linear_layers(model))}"
        )
    beyond = [index for index in lora.layers or () if index >= layers]
    if beyond:
        problems.append(f"--lora-layer-indices {beyond}: the model has layers 0 to {layers - 1}")
    if problems:
        raise PolicyMismatch("\n".join(problems))
