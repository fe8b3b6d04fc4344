"""Records that give a trainer access to the inference server's shared memory.

In host memory it is one memfd, whose descriptor is sent beside the record. On a GPU it is the
server's own allocations, each named by a CUDA IPC handle (CUDA C++ Programming Guide,
"Interprocess Communication"). Handles are sent as hexadecimal text, not as pickles.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from grpo_core.weights.manifest import WeightManifest


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MemfdMemory(_Record):
    """Memory behind the file descriptor that is sent with the grant."""

    kind: Literal["memfd"] = "memfd"


class CudaSegment(_Record):
    """One allocation of the server, as torch's IPC reductions name it.

    `start`: bytes from the start of the shared memory, see `TensorRegion`. `handle` names the block
    that CUDA allocated; the segment starts `handle_offset` bytes into it. `ref_counter` is a file
    in /dev/shm in which torch counts the users of the block; this user's entry is at
    `ref_counter_offset`. `event`: a CUDA event, recorded when the bytes are complete.
    """

    start: int
    nbytes: int
    handle: str
    handle_offset: int
    ref_counter: str
    ref_counter_offset: int
    event: str
    event_sync_required: bool


class CudaPlace(_Record):
    """Properties of the exporting process that the importing process must share.

    `device_uuid`: of the GPU. `torch`: versions of torch and its CUDA, which determine the layout
    of handles. `pid_namespace`: number of the process's PID namespace (namespaces(7)).
    `shm_filesystem`: number of the file system at its /dev/shm.
    """

    device_uuid: str
    device_name: str
    torch: str
    pid_namespace: int
    shm_filesystem: int


class CudaMemory(_Record):
    """GPU allocations, exported for one trainer, because torch counts one user per export."""

    kind: Literal["cuda"] = "cuda"
    place: CudaPlace
    segments: tuple[CudaSegment, ...]


WeightMemory = Annotated[MemfdMemory | CudaMemory, Field(discriminator="kind")]


class WeightGrant(_Record):
    """The answer to a trainer that attaches: its session, and the shared memory.

    The session ends with the connection. If the trainer dies, the connection closes and the server
    resumes from its pause.
    """

    session: str
    manifest: WeightManifest
    memory: WeightMemory


class WeightRefusal(_Record):
    """The answer to a trainer that may not attach, with the reason."""

    refused: str
