"""Options of the forward pass. They change logprobs by rounding at most."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from grpo_core.settings import Mistake

LIGER = "liger"
Choice = Literal["auto", "on", "off"]
"""`auto` turns a feature on if it pays and the model allows it, and logs the reason otherwise.
`on` fails if the feature is not available."""


class ForwardOptions(BaseModel):
    """How logprobs are computed."""

    model_config = ConfigDict(frozen=True)

    packing: Choice = Field(
        "auto",
        description="Compute the sequences of a micro-batch end to end, without padding. auto: on "
        "a GPU if the model allows it, with flash attention if GPU and data type have it",
    )
    fused_head: Choice = Field(
        "auto",
        description="Compute logprobs without all logits in memory at once. auto: on a GPU if the "
        "model allows it",
    )
    head_kernel: Literal["torch", "liger"] = Field(
        "torch",
        description="Implementation of the fused head: torch, or the Triton kernel of "
        "liger-kernel, which needs a GPU",
    )
    compile: bool = Field(
        False, description="Compile the layers with torch.compile, which needs a C++ compiler"
    )

    def forward_conflicts(self) -> Iterator[Mistake]:
        """Options that exclude each other."""
        if self.head_kernel == LIGER and self.fused_head == "off":
            yield Mistake("head_kernel", "liger needs the fused head; drop --fused-head off")
