"""The server's weight memory in this process: mapped from a descriptor, or opened on the GPU."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from grpo_core.weights.manifest import TensorRegion, WeightManifest
from grpo_core.weights.socket import WeightConnection
from grpo_core.weights.transport import CudaMemory
from grpo_trainer.errors import PolicyMismatch
from grpo_trainer.weight_sync.shared_memory.cuda_ipc import OpenedCuda, OwnPlace


class MappedMemory(Protocol):
    """`device`: where the memory is."""

    @property
    def device(self) -> torch.device: ...

    def bytes_of(self, region: TensorRegion) -> Tensor:
        """[nbytes] uint8, sharing memory."""

    def wait_until_written(self) -> None:
        """Until every write that this process has begun is there for others to read."""


class MappedMemfd:
    """Args:
    fd: of the memory; may be closed afterwards
    total_bytes: its size
    """

    device = torch.device("cpu")

    def __init__(self, fd: int, total_bytes: int) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        mapping = mmap.mmap(fd, total_bytes, mmap.MAP_SHARED, protection)
        self._base = torch.frombuffer(mapping, dtype=torch.uint8)

    def bytes_of(self, region: TensorRegion) -> Tensor:
        return self._base[region.offset : region.end]

    def wait_until_written(self) -> None:
        """A processor's writes are there at once."""


@dataclass(frozen=True)
class MappedWeights:
    """The server's weight memory, as tensors."""

    manifest: WeightManifest
    memory: MappedMemory = field(repr=False)

    @property
    def device(self) -> torch.device:
        return self.memory.device

    def view(self, region: TensorRegion) -> Tensor:
        raw = self.memory.bytes_of(region)
        return raw.view(getattr(torch, region.dtype)).view(region.shape)

    def address(self, region: TensorRegion) -> int:
        return self.memory.bytes_of(region).data_ptr()

    def wait_until_written(self) -> None:
        """Until every write that this process has begun is there for the server to read."""
        self.memory.wait_until_written()

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
        return MappedWeights(manifest, OpenedCuda.open(memory, OwnPlace.find()))
    return MappedWeights(manifest, MappedMemfd(connection.fd, manifest.total_bytes))
