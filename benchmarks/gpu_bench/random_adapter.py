"""LoRA adapters of random weights, as PEFT saves them, without a model to put them on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gpu_bench.shapes import ModelShape
from grpo_core.weights.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS

TARGETS = ("q_proj", "v_proj")
"""The trainer's default."""
_STANDARD_DEVIATION = 0.02


def write_random_adapter(shape: ModelShape, rank: int, directory: Path, seed: int) -> Path:
    """In float32, as the trainer's are."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    save_file(dict(_tensors(shape, rank, generator)), directory / ADAPTER_WEIGHTS)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "target_modules": list(TARGETS),
        "bias": "none",
    }
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config))
    return directory


def _tensors(
    shape: ModelShape, rank: int, generator: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    widths = {"q_proj": shape.hidden, "v_proj": shape.kv_width}
    for layer in range(shape.layers):
        for target in TARGETS:
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            a = torch.randn(rank, shape.hidden, generator=generator)
            b = torch.randn(widths[target], rank, generator=generator)
            yield f"{name}.lora_A.weight", a * _STANDARD_DEVIATION
            yield f"{name}.lora_B.weight", b * _STANDARD_DEVIATION
