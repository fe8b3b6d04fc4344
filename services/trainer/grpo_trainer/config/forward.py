"""Options of the forward pass. They change logprobs by rounding at most."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Choice = Literal["auto", "on", "off"]
"""`auto` turns a feature on if it pays and the model allows it, and logs the reason otherwise.
`on` fails if the feature is not available."""


class ForwardOptions(BaseModel):
    """How logprobs are computed."""

    model_config = ConfigDict(frozen=True)

    packing: Choice = Field(
        "auto",
        description="Concatenate the sequences of a micro-batch instead of padding them, and "
        "compute a beginning that several sequences share, for example the prompt of a group, only "
        "once. auto: on if the model supports packing",
    )
    fused_head: Choice = Field(
        "auto",
        description="Compute logprobs with a fused head, which never holds the logits of all tokens"
        " in memory at once. auto: on if the model supports the fused head",
    )
    compile: bool = Field(
        False,
        description="Compile the model's layers with torch.compile, which needs a C++ compiler "
        "for a CPU and a C compiler for a GPU",
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Store only the input of each layer, and compute the layer again in the "
        "backward pass. This saves memory and increases the computation of a step by about a third",
    )
