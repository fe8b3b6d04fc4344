"""The shared memory that holds the served weights once, for the server and the trainer.

On CPU it is an *arena*: one memfd (memfd_create(2)). It is independent of /dev/shm's size, sealed
against resizing, and exists as long as a process maps it. On a GPU the parameters stay where vLLM
allocated them, because a separate arena would double the peak memory. They are exported to one
trainer by CUDA's interprocess communication (IPC): as in torch/multiprocessing/reductions.py, an
export names an allocation by its CUDA block's handle and the offset in the block. Each export takes
a slot in torch's reference count, which the process that opens it releases. So exactly one process
must open an export, and only once.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from grpo_core.weights.shared_memory import (
    CudaMemory,
    CudaPlace,
    CudaSegment,
    TensorRegion,
    pid_namespace,
    shm_filesystem,
    torch_build,
)

ALIGNMENT_BYTES = 256
"""Every tensor starts at a multiple of this, which covers vector registers and cache lines."""
MEMFD_NAME = "grpo-weights"
NATIVE = "native"
EXPANDABLE_ADVICE = (
    "start the server without expandable_segments:True in PYTORCH_ALLOC_CONF (or "
    "PYTORCH_CUDA_ALLOC_CONF)"
)


def aligned(size_bytes: int) -> int:
    """Round up to the next multiple of `ALIGNMENT_BYTES`."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 → "float32"."""
    return str(dtype).removeprefix("torch.")


def region_at(offset: int, tensor: torch.Tensor) -> TensorRegion:
    """The region of a contiguous tensor like this one at `offset`."""
    return TensorRegion(
        offset=offset,
        nbytes=tensor.nbytes,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
    )


@dataclass(frozen=True)
class Segment:
    """One allocation. `start`: its offset in the shared memory, in bytes."""

    start: int
    storage: torch.UntypedStorage

    @property
    def address(self) -> int:
        return self.storage.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes()


class WeightMemory:
    """Allocations that are addressed by one common offset, as if they followed each other.

    `fd`: the memfd of an arena; None on a GPU.

    Args:
        tensors: the tensors to share. Tensors in the same allocation share one segment.
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
        """Allocate an arena on the host. Raises `OSError` if there is too little memory."""
        fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, total_bytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        mapping = mmap.mmap(fd, total_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        return cls([torch.frombuffer(mapping, dtype=torch.uint8)], fd)

    def keep_only(self, tensors: Iterable[torch.Tensor]) -> None:
        """Release segments that hold none of `tensors`. The others keep their offsets."""
        offsets = [offset for t in tensors if (offset := self.offset_of(t)) is not None]
        starts = {self._starts[bisect_right(self._starts, offset) - 1] for offset in offsets}
        self._take([segment for segment in self.segments if segment.start in starts])

    def _take(self, segments: list[Segment]) -> None:
        self.segments = segments
        self._starts = [segment.start for segment in segments]
        self._by_address = sorted(segments, key=lambda segment: segment.address)
        self._addresses = [segment.address for segment in self._by_address]

    def view(self, region: TensorRegion) -> torch.Tensor:
        """The tensor in `region`, without a copy."""
        segment = self.segments[bisect_right(self._starts, region.offset) - 1]
        raw = torch.empty(0, dtype=torch.uint8, device=segment.storage.device)
        raw.set_(segment.storage, region.offset - segment.start, (region.nbytes,), (1,))
        return raw.view(getattr(torch, region.dtype)).view(region.shape)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Bytes from the start of the memory; None if the tensor is outside of it."""
        index = bisect_right(self._addresses, tensor.data_ptr()) - 1
        if index < 0 or not tensor.numel():
            return None
        segment = self._by_address[index]
        within = tensor.data_ptr() - segment.address
        return segment.start + within if within < segment.nbytes else None


def exported(memory: WeightMemory) -> CudaMemory:
    """Export the memory to one trainer. Raises `RuntimeError` if CUDA refuses."""
    device = torch.cuda.get_device_properties(memory.segments[0].storage.device)
    return CudaMemory(
        place=CudaPlace(
            device_uuid=str(device.uuid),
            device_name=device.name,
            torch=torch_build(torch.__version__, torch.version.cuda),
            pid_namespace=pid_namespace(),
            shm_filesystem=shm_filesystem(),
        ),
        segments=tuple(_exported(segment) for segment in memory.segments),
    )


def why_not_exportable(memory: WeightMemory) -> str | None:
    """The reason why CUDA cannot export the memory; None if it can."""
    backend = torch.cuda.memory.get_allocator_backend()
    if backend != NATIVE:
        return f"torch's {backend} cannot share memory; omit backend: in PYTORCH_ALLOC_CONF"
    snapshot: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    spans = [
        range(segment["address"], segment["address"] + segment["total_size"])
        for segment in snapshot
        if segment.get("is_expandable")
    ]
    expandable = sum(any(s.address in span for span in spans) for s in memory.segments)
    if expandable:
        return (
            f"{expandable} of {len(memory.segments)} parameters are in expandable segments of "
            f"torch's allocator, which an unprivileged process cannot open; {EXPANDABLE_ADVICE}"
        )
    return None


def _exported(segment: Segment) -> CudaSegment:
    shared = segment.storage._share_cuda_()  # type: ignore[no-untyped-call]
    _, handle, nbytes, offset, ref_counter, ref_counter_offset, event, sync = shared
    return CudaSegment(
        start=segment.start,
        nbytes=nbytes,
        handle=handle.hex(),
        handle_offset=offset,
        ref_counter=ref_counter.hex(),
        ref_counter_offset=ref_counter_offset,
        event=event.hex(),
        event_sync_required=sync,
    )
