"""Where each parameter lies inside the inference server's weight memory.

Written by the server while it loads the checkpoint, read by the trainer, which builds its model
from views into the same memory. Names are the checkpoint's own (Hugging Face) names. How the memory
itself gets from one process to the other is `grpo_core.weights.memory_grant`'s matter.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class TensorRegion(BaseModel):
    """One contiguous tensor: `offset` and `nbytes` in bytes from the start of the weight memory.

    Where that consists of several allocations (on a GPU), offsets are counted as if they lay one
    behind the other; a region never reaches from one into the next.
    """

    model_config = ConfigDict(frozen=True)

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    """torch's name without the prefix: "float32", "bfloat16"."""

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class ParameterMapping(TensorRegion):
    """The same, and which of the server's own parameters holds it.

    vLLM fuses q, k and v, or gate and up, into one parameter, and pads vocabularies: the
    checkpoint's tensor is then rows `slice` = (start, stop) of it along dimension 0. None: the
    whole parameter.
    """

    vllm_name: str
    slice: tuple[int, int] | None


class WeightManifest(BaseModel):
    """`generation` is new at every engine start: the weights under another one are not ours."""

    model_config = ConfigDict(frozen=True)

    generation: str
    model: str
    total_bytes: int
    parameters: dict[str, ParameterMapping]
