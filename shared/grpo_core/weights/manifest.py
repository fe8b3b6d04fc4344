"""Describes the position of each parameter in the shared memory.

The server writes this record while it loads the checkpoint. The trainer reads it to build its model
from views into the same memory. Names are those of the checkpoint (Hugging Face).
`grpo_core.weights.memory_grant` describes how the trainer gets the memory itself.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class TensorRegion(BaseModel):
    """One contiguous tensor, `offset` bytes after the start of the shared memory.

    On a GPU that memory has several allocations. Offsets then count as if the allocations were one
    block, and a region never crosses from one allocation into the next.
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
    """A tensor of the checkpoint, and the parameter of vLLM that holds it.

    vLLM fuses q, k and v, or gate and up, into one parameter, and pads vocabularies. The tensor is
    then the rows `slice` = (start, stop) of that parameter. None stands for the whole parameter.
    """

    vllm_name: str
    slice: tuple[int, int] | None


class WeightManifest(BaseModel):
    """All parameters in the shared memory. `generation` changes at every engine start."""

    model_config = ConfigDict(frozen=True)

    generation: str
    model: str
    total_bytes: int
    parameters: dict[str, ParameterMapping]
