"""Records that describe the inference server's shared memory, and give a trainer access to it.

The server writes the manifest while it loads the checkpoint. The trainer reads it to build its
model from views into the same memory. Names are those of the checkpoint (Hugging Face).

In host memory it is one memfd, whose descriptor is sent beside the record. On a GPU it is the
server's own allocations, each named by a CUDA IPC handle (CUDA C++ Programming Guide,
"Interprocess Communication"). Handles are sent as hexadecimal text, not as pickles. CUDA finds the
exporting process by its process id, so both processes need the same PID namespace. torch counts the
users of exported memory in files in /dev/shm, so both need the same file system there. By default
every container has its own PID namespace and its own /dev/shm.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field


class TensorRegion(BaseModel, frozen=True):
    """One contiguous tensor, `offset` bytes after the start of the shared memory.

    On a GPU that memory has several allocations. Offsets then count as if the allocations were one
    block, and a region never crosses from one allocation into the next.
    """

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    """torch's name without the prefix: "float32", "bfloat16"."""

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class ParameterMapping(TensorRegion):
    """A tensor of the checkpoint, and the parameter of vLLM that holds it.

    vLLM fuses q, k and v, or gate and up, into one parameter, and pads vocabularies. The tensor is
    then the rows `slice` = (start, stop) of that parameter. None stands for the whole parameter.
    """

    vllm_name: str
    slice: tuple[int, int] | None


class WeightManifest(BaseModel, frozen=True):
    """All parameters in the shared memory. `generation` changes at every engine start."""

    generation: str
    model: str
    total_bytes: int
    parameters: dict[str, ParameterMapping]


class _Record(BaseModel, frozen=True, extra="forbid"):
    """Unknown fields are refused."""


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


_PID_NAMESPACE = Path("/proc/self/ns/pid")
_SHM = Path("/dev/shm")


def pid_namespace() -> int:
    """Number of this process's PID namespace (namespaces(7)), unique while that exists."""
    return _PID_NAMESPACE.stat().st_ino


def torch_build(version: str, cuda: str | None) -> str:
    """torch's version and CUDA version as one text, which both processes compare."""
    return f"{version} with CUDA {cuda}"


def shm_filesystem() -> int:
    """Number of the file system at /dev/shm; 0 if there is none."""
    try:
        return os.stat(_SHM).st_dev
    except OSError:
        return 0
