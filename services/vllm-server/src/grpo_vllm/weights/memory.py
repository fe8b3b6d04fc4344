"""What the loader asks of the memory that parameters lie in, whatever it is made of."""

from __future__ import annotations

from typing import Protocol

import torch

from grpo_core.weights.manifest import TensorRegion

ALIGNMENT_BYTES = 256
"""Start of every tensor: a multiple of any vector register and cache line."""


class ParameterMemory(Protocol):
    """`arena.Arena` on the host, `device_memory.DeviceMemory` on a GPU."""

    @property
    def total_bytes(self) -> int: ...

    def view(self, region: TensorRegion) -> torch.Tensor:
        """The tensor that lies in `region`, sharing memory."""

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Bytes from the start of the memory, or None when the tensor lies elsewhere."""


def aligned(size_bytes: int) -> int:
    """Round up to the next multiple of `ALIGNMENT_BYTES`."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 → "float32"."""
    return str(dtype).removeprefix("torch.")
