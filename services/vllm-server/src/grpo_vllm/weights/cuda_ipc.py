"""Exports parameters on a GPU to one consumer, by CUDA's interprocess communication.

torch's own reductions (torch/multiprocessing/reductions.py) name an allocation by the handle of the
block that CUDA gave it, and by the place in it. Each export takes a slot in torch's count of users,
which the consumer that opens it gives back: an export must be opened by one consumer, once.
"""

from __future__ import annotations

from typing import Any

import torch

from grpo_core.weights.cuda_ipc_host import pid_namespace, shm_filesystem, torch_build
from grpo_core.weights.memory_grant import CudaMemory, CudaPlace, CudaSegment
from grpo_vllm.weights.memory import Segment, WeightMemory

NATIVE = "native"
EXPANDABLE_ADVICE = (
    "start the server without expandable_segments:True in PYTORCH_ALLOC_CONF (or "
    "PYTORCH_CUDA_ALLOC_CONF)"
)


def exported(memory: WeightMemory) -> CudaMemory:
    """For one consumer. Raises RuntimeError where CUDA refuses."""
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
    """What torch's allocator has done that CUDA cannot export; None where nothing is."""
    backend = torch.cuda.memory.get_allocator_backend()
    if backend != NATIVE:
        return (
            f"torch allocates with {backend}, whose memory other processes cannot open; start the "
            "server without backend: in PYTORCH_ALLOC_CONF"
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
            f"{expandable} of {len(memory.segments)} parameters lie in expandable segments of "
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
