"""Maps the server's weight memory into this process, from a file descriptor or from the GPU."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_core.weights.manifest import TensorRegion, WeightManifest
from grpo_core.weights.memory_grant import CudaMemory
from grpo_core.weights.socket import WeightConnection
from grpo_trainer.errors import PolicyMismatch
from grpo_trainer.weight_sync.shared_memory.cuda_ipc import OpenedCuda, OwnPlace


@dataclass(frozen=True)
class MappedWeights:
    """The server's weight memory as tensors. `bytes_of` returns [nbytes] uint8 that shares the
    memory."""

    manifest: WeightManifest
    device: torch.device
    bytes_of: Callable[[TensorRegion], Tensor] = field(repr=False)

    def view(self, region: TensorRegion) -> Tensor:
        raw = self.bytes_of(region)
        return raw.view(getattr(torch, region.dtype)).view(region.shape)

    def address(self, region: TensorRegion) -> int:
        return self.bytes_of(region).data_ptr()

    def wait_until_written(self) -> None:
        """Wait until the server can read every write of this process."""
        if self.device.type == "cuda":  # a CPU's writes are visible at once
            torch.cuda.synchronize(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' data type. Raises `PolicyMismatch` if they have several."""
        names = sorted({region.dtype for region in self.manifest.parameters.values()})
        if len(names) != 1:
            raise PolicyMismatch(
                f"the server's parameters have several data types: {names}; start the server "
                "with one --dtype"
            )
        dtype: torch.dtype = getattr(torch, names[0])
        return dtype

    @property
    def dtype_name(self) -> str:
        """The name without the prefix, such as "float32" or "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")


def map_weights(connection: WeightConnection) -> MappedWeights:
    """Raises `UnreachableWeights` if the weights are on a GPU that this process cannot share."""
    memory, manifest = connection.grant.memory, connection.grant.manifest
    if isinstance(memory, CudaMemory):
        opened = OpenedCuda.open(memory, OwnPlace.find())
        return MappedWeights(manifest, opened.device, opened.bytes_of)
    # The mapping stays valid after the descriptor is closed.
    mapping = mmap.mmap(connection.fd, manifest.total_bytes, mmap.MAP_SHARED)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    return MappedWeights(manifest, whole.device, lambda r: whole[r.offset : r.end])
