"""Memory that holds the model's weights once, for the server and the trainer.

On the host it is an arena: a memfd (memfd_create(2)), which is anonymous, not bound by /dev/shm's
size, sealed against resizing, and alive as long as a process maps it. On a GPU the parameters stay
where vLLM put them, since an arena beside them would double the peak.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from grpo_core.weights.manifest import TensorRegion

ALIGNMENT_BYTES = 256
"""Start of every tensor: a multiple of any vector register and cache line."""
MEMFD_NAME = "grpo-weights"


def aligned(size_bytes: int) -> int:
    """Round up to the next multiple of `ALIGNMENT_BYTES`."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 → "float32"."""
    return str(dtype).removeprefix("torch.")


def region_at(offset: int, tensor: torch.Tensor) -> TensorRegion:
    """The region that a contiguous tensor like this one takes there."""
    return TensorRegion(
        offset=offset,
        nbytes=tensor.nbytes,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
    )


@dataclass(frozen=True)
class Segment:
    """One allocation. `start`: its place in the weight memory, in bytes."""

    start: int
    storage: torch.UntypedStorage

    @property
    def address(self) -> int:
        return self.storage.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes()


class WeightMemory:
    """Offsets are counted as if the allocations lay one behind the other.

    `fd`: the memfd of an arena; None on a GPU.

    Args:
        tensors: to be shared; those that lie in one allocation share its segment
    """

    def __init__(self, tensors: Iterable[torch.Tensor], fd: int | None = None) -> None:
        self.fd = fd
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        segments, total_bytes = [], 0
        for storage in storages.values():
            segments.append(Segment(total_bytes, storage))
            total_bytes += aligned(storage.nbytes())
        self.total_bytes = total_bytes
        self._take(segments)

    @classmethod
    def arena(cls, total_bytes: int) -> WeightMemory:
        """Allocate on the host. Raises `OSError` when the memory is not to be had."""
        fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, total_bytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        mapping = mmap.mmap(fd, total_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        return cls([torch.frombuffer(mapping, dtype=torch.uint8)], fd)

    def keep_only(self, tensors: Iterable[torch.Tensor]) -> None:
        """Release segments that hold none of `tensors`; the others keep their places."""
        offsets = [offset for t in tensors if (offset := self.offset_of(t)) is not None]
        starts = {self._starts[bisect_right(self._starts, offset) - 1] for offset in offsets}
        self._take([segment for segment in self.segments if segment.start in starts])

    def _take(self, segments: list[Segment]) -> None:
        self.segments = segments
        self._starts = [segment.start for segment in segments]
        self._by_address = sorted(segments, key=lambda segment: segment.address)
        self._addresses = [segment.address for segment in self._by_address]

    def view(self, region: TensorRegion) -> torch.Tensor:
        """The tensor that lies in `region`, sharing memory."""
        segment = self.segments[bisect_right(self._starts, region.offset) - 1]
        raw = torch.empty(0, dtype=torch.uint8, device=segment.storage.device)
        raw.set_(segment.storage, region.offset - segment.start, (region.nbytes,), (1,))
        return raw.view(getattr(torch, region.dtype)).view(region.shape)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Bytes from the start of the memory, or None when the tensor lies elsewhere."""
        index = bisect_right(self._addresses, tensor.data_ptr()) - 1
        if index < 0 or not tensor.numel():
            return None
        segment = self._by_address[index]
        within = tensor.data_ptr() - segment.address
        return segment.start + within if within < segment.nbytes else None
