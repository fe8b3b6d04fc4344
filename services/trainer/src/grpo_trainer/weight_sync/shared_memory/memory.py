"""The server's weight memory in this process: mapped from a descriptor, or opened on the GPU."""

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
    """The server's weight memory, as tensors. `bytes_of`: [nbytes] uint8, sharing memory."""

    manifest: WeightManifest
    device: torch.device
    bytes_of: Callable[[TensorRegion], Tensor] = field(repr=False)

    def view(self, region: TensorRegion) -> Tensor:
        raw = self.bytes_of(region)
        return raw.view(getattr(torch, region.dtype)).view(region.shape)

    def address(self, region: TensorRegion) -> int:
        return self.bytes_of(region).data_ptr()

    def wait_until_written(self) -> None:
        """Until every write that this process has begun is there for the server to read."""
        if self.device.type == "cuda":  # a processor's writes are there at once
            torch.cuda.synchronize(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters. Raises `PolicyMismatch` where there are several."""
        names = sorted({region.dtype for region in self.manifest.parameters.values()})
        if len(names) != 1:
            raise PolicyMismatch(f"the server holds parameters of several dtypes: {names}")
        dtype: torch.dtype = getattr(torch, names[0])
        return dtype

    @property
    def dtype_name(self) -> str:
        """ "float32", "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")


def map_weights(connection: WeightConnection) -> MappedWeights:
    """Raises `UnreachableWeights` if they are on a GPU that this process cannot share."""
    memory, manifest = connection.grant.memory, connection.grant.manifest
    if isinstance(memory, CudaMemory):
        opened = OpenedCuda.open(memory, OwnPlace.find())
        return MappedWeights(manifest, opened.device, opened.bytes_of)
    # The descriptor may be closed afterwards.
    mapping = mmap.mmap(connection.fd, manifest.total_bytes, mmap.MAP_SHARED)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    return MappedWeights(manifest, whole.device, lambda r: whole[r.offset : r.end])
