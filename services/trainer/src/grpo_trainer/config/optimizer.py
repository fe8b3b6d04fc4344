"""Options of the optimizer step, and which of them go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class OptimizerOptions(BaseModel):
    """How a gradient changes the weights."""

    model_config = ConfigDict(frozen=True)

    lr: float = Field(1e-5, gt=0, description="Peak learning rate")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear learning-rate warm-up")
    optimizer: Literal["adamw", "adamw_8bit"] = Field(
        "adamw",
        description="adamw: moments in float32, 8 bytes per weight; adamw_8bit: in 2, by "
        "bitsandbytes",
    )
    weight_decay: float = Field(0.01, ge=0, description="AdamW's weight decay")
    max_grad_norm: float = Field(1.0, gt=0, description="Bound on the gradient's L2 norm")
    master_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Data type of the weights that the optimizer steps on; bfloat16: half the "
        "memory, where the served weights are in bfloat16",
    )
    rounding: Literal["nearest", "stochastic"] | None = Field(
        None,
        description="How an update is rounded into bfloat16 masters (default: stochastic); with "
        "nearest, small updates are lost",
    )
    fused_step: bool = Field(
        False,
        description="One GPU kernel for the whole step: adamw on float32 masters, and the weights "
        "to serve",
    )

    def optimizer_conflicts(self) -> Iterator[str]:
        """Of options that exclude each other."""
        if self.master_dtype == "float32" and self.rounding == "stochastic":
            yield (
                "--rounding stochastic: for --master-dtype bfloat16; float32 masters keep every "
                "update, and what is served is the nearest to them"
            )
        needed = {"optimizer": "adamw", "master_dtype": "float32"}
        for name, value in needed.items():
            if self.fused_step and getattr(self, name) != value:
                yield f"--fused-step: for --{name.replace('_', '-')} {value} alone"
