"""Options of the forward pass: none of them changes the log-probabilities, beyond rounding."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Self

from pydantic import Field, model_validator

from grpo_core.settings import CommandSettings


class ForwardSettings(CommandSettings):
    """How log-probabilities are computed."""

    packing: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Compute the sequences of a micro-batch end to end, without padding, and with "
        "flash attention where GPU and data type have it; auto: on a GPU, if the model allows it",
    )
    fused_head: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Compute log-probabilities without all logits in memory at once; auto: on a "
        "GPU, if the model allows it",
    )
    head_kernel: Literal["torch", "liger"] = Field(
        "torch",
        description="What computes with the fused head's logits: torch, or liger-kernel's Triton "
        "kernel, on a GPU",
    )
    compile: bool = Field(
        False, description="Compile the layers with torch.compile: needs a compiler on this machine"
    )

    @model_validator(mode="after")
    def _a_kernel_has_a_head(self) -> Self:
        if self.head_kernel == LIGER and Choice(self.fused_head) is Choice.OFF:
            raise ValueError(
                "--head-kernel liger: computes inside the fused head, which --fused-head off "
                "leaves out; drop one of the two"
            )
        return self

    @property
    def forward_options(self) -> ForwardOptions:
        return ForwardOptions(
            Choice(self.packing), Choice(self.fused_head), self.compile, self.head_kernel
        )


TORCH, LIGER = "torch", "liger"


class Choice(StrEnum):
    AUTO = "auto"
    """Where it pays and the model allows it; where not, the log says why."""
    ON = "on"
    """Or an error that says why not."""
    OFF = "off"


@dataclass(frozen=True)
class ForwardOptions:
    """`packing`: sequences end to end, without padding. `fused_head`: log-probabilities without all
    logits at once. `compile`: the layers by torch.compile. `head_kernel`: whose code the fused head
    computes with."""

    packing: Choice = Choice.AUTO
    fused_head: Choice = Choice.AUTO
    compile: bool = False
    head_kernel: str = TORCH
