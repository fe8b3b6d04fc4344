"""Memory of the host that holds the model's weights once, for the server and the trainer alike.

A memfd (memfd_create(2)): anonymous, not bound by /dev/shm's size, sealed against resizing, and
alive as long as somebody maps it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass, field

import torch

from grpo_core.weights.manifest import TensorRegion

MEMFD_NAME = "grpo-weights"


@dataclass
class Arena:
    """`base` is the whole memory as bytes [total_bytes] uint8."""

    fd: int
    total_bytes: int
    base: torch.Tensor = field(repr=False)

    @classmethod
    def create(cls, total_bytes: int) -> Arena:
        """Allocate. Raises `OSError` when the memory is not to be had."""
        fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, total_bytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        mapping = mmap.mmap(fd, total_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        return cls(fd, total_bytes, torch.frombuffer(mapping, dtype=torch.uint8))

    def view(self, region: TensorRegion) -> torch.Tensor:
        """The tensor that lies in `region`, sharing memory."""
        raw = self.base[region.offset : region.end]
        return raw.view(getattr(torch, region.dtype)).view(region.shape)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Bytes from the start of the arena, or None when the tensor lies elsewhere."""
        offset = tensor.data_ptr() - self.base.data_ptr()
        return offset if tensor.numel() and 0 <= offset < self.total_bytes else None
