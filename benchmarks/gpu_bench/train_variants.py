"""The trainer's options that are measured against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec

from benchmarks.gpu_bench.shapes import ShapeName
from grpo_trainer.config.forward import ForwardOptions

Options = Mapping[str, object]
"""Of `TrainerSettings`, by the names of its fields."""

ADAMW: Options = {}
FUSED: Options = {"fused_step": True}
ADAMW_8BIT: Options = {"optimizer": "adamw_8bit"}
ADAMW_8BIT_BFLOAT16: Options = {"optimizer": "adamw_8bit", "master_dtype": "bfloat16"}
ADAMW_BFLOAT16: Options = {"master_dtype": "bfloat16"}


@dataclass(frozen=True)
class Variant:
    """`name`: as in the tables."""

    name: str
    forward: ForwardOptions
    optimizer: Options = field(default_factory=dict)


def forward_variants(optimizer: Options) -> list[Variant]:
    """Each with one more of what makes the pass faster."""
    ways = {
        "padded": ForwardOptions(packing="off", fused_head="off", compile=False),
        "padded, fused head": ForwardOptions(packing="off", fused_head="on", compile=False),
        "packed, fused head": ForwardOptions(packing="on", fused_head="on", compile=False),
        "packed, fused head, compiled": ForwardOptions(packing="on", fused_head="on", compile=True),
    }
    label = optimizer_name(optimizer)
    return [Variant(f"{name}; {label}", forward, optimizer) for name, forward in ways.items()]


def optimizer_variants(besides: Options) -> list[Variant]:
    """The others than `besides`, with the forward pass that the trainer takes by default."""
    forward = ForwardOptions()
    return [
        Variant(f"default; {optimizer_name(options)}", forward, options)
        for options in (ADAMW, FUSED, ADAMW_8BIT, ADAMW_8BIT_BFLOAT16, ADAMW_BFLOAT16)
        if options != besides
    ]


def usual_optimizer(size: ShapeName) -> Options:
    """What the forward variants are measured with: the default, where it fits the GPU."""
    if size != "7b":
        return ADAMW
    return ADAMW_8BIT if find_spec("bitsandbytes") else ADAMW_BFLOAT16


def optimizer_beside_server(size: ShapeName) -> Options:
    """The same with a server on the GPU."""
    return ADAMW_8BIT_BFLOAT16 if size == "7b" else ADAMW


def optimizer_name(options: Options) -> str:
    name = "fused adamw" if options.get("fused_step") else str(options.get("optimizer", "adamw"))
    masters = options.get("master_dtype", "float32")
    return f"{name}, {masters} masters"
