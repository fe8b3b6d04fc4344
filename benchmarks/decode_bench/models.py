"""The models that the benchmarks of sampling take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo_tiny_model.model import ensure_tiny_model
from grpo_tiny_model.smollm2 import ensure_smollm2

ModelName = Literal["tiny", "smollm2"]


@dataclass(frozen=True)
class DecodeModel:
    """`name`: as the report calls it; `suffix`: of the title of its section"""

    name: str
    suffix: str
    directory: Path


def decode_model(name: ModelName) -> DecodeModel:
    if name == "tiny":
        return DecodeModel("the tiny model", "", ensure_tiny_model())
    return DecodeModel("SmolLM2-135M", " (SmolLM2-135M)", ensure_smollm2())
