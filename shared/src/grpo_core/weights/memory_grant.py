"""How the weight memory gets from the inference server to a trainer: the records on the wire.

On the host the memory is one memfd, whose descriptor travels beside the record. On a GPU it is the
server's own allocations, each named by a handle of CUDA's interprocess communication (CUDA C++
Programming Guide, "Interprocess Communication"); handles travel as hexadecimal text, never as
pickles.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from grpo_core.weights.manifest import WeightManifest


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MemfdMemory(_Record):
    """The memory is the descriptor that comes with the grant."""

    kind: Literal["memfd"] = "memfd"


class CudaSegment(_Record):
    """One allocation of the server, as torch's IPC reductions name it.

    `start`: of the segment in the weight memory, in bytes, see `TensorRegion`. `handle` names the
    block that CUDA allocated, and the segment lies `handle_offset` bytes into it. `ref_counter` is
    a file in /dev/shm in which torch counts who uses the block, and this consumer's place in it.
    `event`: of CUDA; it has been recorded when the bytes are complete.
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
    """Where the exporting process is: what the importing one must have in common with it.

    `device_uuid`: of the GPU. `torch`: version and CUDA version of torch's build, which decides on
    the layout of handles. `pid_namespace`: number of the process's PID namespace
    (namespaces(7)). `shm_filesystem`: number of the file system that it has at /dev/shm.
    """

    device_uuid: str
    device_name: str
    torch: str
    pid_namespace: int
    shm_filesystem: int


class CudaMemory(_Record):
    """Allocations on a GPU, exported for one consumer: torch counts one user per export."""

    kind: Literal["cuda"] = "cuda"
    place: CudaPlace
    segments: tuple[CudaSegment, ...]


WeightMemory = Annotated[MemfdMemory | CudaMemory, Field(discriminator="kind")]


class WeightGrant(_Record):
    """What a trainer gets when it connects: a session to act under, and the memory.

    The session lives as long as the connection. A trainer that dies closes it, and whatever it
    had paused goes on.
    """

    session: str
    manifest: WeightManifest
    memory: WeightMemory


class WeightRefusal(_Record):
    """What a trainer gets instead of a grant."""

    refused: str
