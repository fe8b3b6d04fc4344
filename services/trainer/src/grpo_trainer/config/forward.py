"""Options of the forward pass: none of them changes the log-probabilities, beyond rounding."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

LIGER = "liger"
Choice = Literal["auto", "on", "off"]
"""auto: where it pays and the model allows it, and where not, the log says why; on: or an error."""


class ForwardOptions(BaseModel):
    """How log-probabilities are computed."""

    model_config = ConfigDict(frozen=True)

    packing: Choice = Field(
        "auto",
        description="Compute the sequences of a micro-batch end to end, without padding, and with "
        "flash attention where GPU and data type have it; auto: on a GPU, if the model allows it",
    )
    fused_head: Choice = Field(
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
        if self.head_kernel == LIGER and self.fused_head == "off":
            raise ValueError(
                "--head-kernel liger: computes inside the fused head, which --fused-head off "
                "leaves out; drop one of the two"
            )
        return self
