"""Opens the server's allocations on the GPU, which it exported for this process alone.

The twin of `grpo_vllm.weights.cuda_ipc`. What would fail later, or crash, is looked for first: both
processes must be on one GPU, with one build of torch, in one PID namespace and with one /dev/shm.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_core.weights.cuda_ipc_host import pid_namespace, shm_filesystem, torch_build
from grpo_core.weights.manifest import TensorRegion
from grpo_core.weights.memory_grant import CudaMemory, CudaPlace, CudaSegment
from grpo_trainer.errors import UnreachableWeights


@dataclass(frozen=True)
class OwnPlace:
    """Where this process is. `devices`: index of each GPU that it sees, by UUID."""

    devices: Mapping[str, int]
    torch: str
    pid_namespace: int
    shm_filesystem: int

    @classmethod
    def find(cls) -> OwnPlace:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
        return cls(
            devices={uuid: index for index, uuid in enumerate(uuids)},
            torch=torch_build(torch.__version__, torch.version.cuda),
            pid_namespace=pid_namespace(),
            shm_filesystem=shm_filesystem(),
        )

    def obstacles(self, server: CudaPlace) -> list[str]:
        """All that stands between this process and memory of the server; [] where nothing does."""
        problems = []
        if server.device_uuid not in self.devices:
            seen = ", ".join(self.devices) or "none"
            problems.append(
                f"the weights are on {server.device_name} {server.device_uuid}; this process sees "
                f"{seen}: give both the same GPU (CUDA_VISIBLE_DEVICES, or the container's devices)"
            )
        if server.torch != self.torch:
            problems.append(
                f"the server runs torch {server.torch}, this process {self.torch}: install the "
                "same build on both sides"
            )
        if server.pid_namespace != self.pid_namespace:
            problems.append(
                "server and trainer are in different PID namespaces, and CUDA finds the exporting "
                "process by its number: start one container with the other's (pid: service:...)"
            )
        if server.shm_filesystem != self.shm_filesystem:
            problems.append(
                "server and trainer have different /dev/shm, where torch counts users of exported "
                "memory: start one container with the other's (ipc: service:..., the other with "
                "ipc: shareable)"
            )
        return problems


@dataclass(frozen=True)
class OpenedCuda:
    """The server's segments in this process. `starts`: of each in the server's memory."""

    device: torch.device
    starts: list[int]
    storages: list[torch.UntypedStorage]

    @classmethod
    def open(cls, memory: CudaMemory, own: OwnPlace) -> OpenedCuda:
        """Map every segment into this process, which is at `own`.

        Raises:
            UnreachableWeights: lists what stands in the way, or says what CUDA said.
        """
        problems = own.obstacles(memory.place)
        if problems:
            raise unreachable(problems)
        index = own.devices[memory.place.device_uuid]
        try:
            storages = [_opened(segment, index) for segment in memory.segments]
        except RuntimeError as error:  # of torch and CUDA
            raise unreachable([f"CUDA does not open the server's memory: {error}"]) from error
        starts = [segment.start for segment in memory.segments]
        return cls(torch.device("cuda", index), starts, storages)

    def bytes_of(self, region: TensorRegion) -> Tensor:
        index = bisect_right(self.starts, region.offset) - 1
        raw = torch.empty(0, dtype=torch.uint8, device=self.device)
        within = region.offset - self.starts[index]
        return raw.set_(self.storages[index], within, (region.nbytes,), (1,))


def unreachable(problems: list[str]) -> UnreachableWeights:
    return UnreachableWeights(
        "the server's weights cannot be shared with this trainer:\n  " + "\n  ".join(problems)
    )


def _opened(segment: CudaSegment, device_index: int) -> torch.UntypedStorage:
    """The index of the GPU is this process's own: the server may count otherwise."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(
        device_index,
        bytes.fromhex(segment.handle),
        segment.nbytes,
        segment.handle_offset,
        bytes.fromhex(segment.ref_counter),
        segment.ref_counter_offset,
        bytes.fromhex(segment.event),
        segment.event_sync_required,
    )
    return storage
