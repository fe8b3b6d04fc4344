"""The server's weight memory in this process: mapped from a descriptor, or opened on the GPU."""

from __future__ import annotations

import mmap
from typing import Protocol

import torch
from torch import Tensor

from grpo_core.weights.manifest import TensorRegion
from grpo_core.weights.socket import WeightConnection
from grpo_core.weights.transport import CudaMemory
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


def map_memory(connection: WeightConnection) -> MappedMemory:
    """Raises `UnreachableWeights` where the memory is on a GPU that this process cannot share."""
    memory, manifest = connection.grant.memory, connection.grant.manifest
    if isinstance(memory, CudaMemory):
        return OpenedCuda.open(memory, OwnPlace.find())
    return MappedMemfd(connection.fd, manifest.total_bytes)
