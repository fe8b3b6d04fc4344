"""Exports parameters on a GPU to one trainer by CUDA's interprocess communication (IPC).

As in torch/multiprocessing/reductions.py, an export names an allocation by its CUDA block's handle
and the offset in the block. Each export takes a slot in torch's reference count, which the process
that opens it releases. So exactly one process must open an export, and only once.
"""

from __future__ import annotations

from typing import Any

import torch

from grpo_core.weights.shared_memory import (
    CudaMemory,
    CudaPlace,
    CudaSegment,
    pid_namespace,
    shm_filesystem,
    torch_build,
)
from grpo_vllm.weights.memory import Segment, WeightMemory

NATIVE = "native"
EXPANDABLE_ADVICE = (
    "start the server without expandable_segments:True in PYTORCH_ALLOC_CONF (or "
    "PYTORCH_CUDA_ALLOC_CONF)"
)


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
        return (
            f"other processes cannot open memory of torch's allocator {backend}; start the server "
            "without backend: in PYTORCH_ALLOC_CONF"
        )
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
