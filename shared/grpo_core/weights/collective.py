"""How versions travel through a process group of the trainer's rank 0 and the servers' workers.

The trainer records the newest group in Redis, below the run's prefix:

    weights:group         `GroupAddress` as JSON

Trainer and workers meet in the group's store, which the trainer keeps. Below the address's token:

    hello, hello/<i>      number of workers that came, and the `Member` that came as the i-th
    members               the `Member`s that are admitted, in the order of their ranks, from 1 on
    offer/<n>             `Offer` of the n-th version, whose files follow it; or `NO_MORE`
    manifest/<n>          its manifest
    done/<n>/<rank>       `VERIFIED`, or the reason why this worker has no complete copy

Each file travels in buckets of `BUCKET_BYTES`. The workers of a server fill one directory: worker k
of n writes and verifies the chunks k, k + n, … of each file. Only then does the trainer announce
the version, with the digest of its manifest.

This package imports no torch, so functions take `torch.distributed` as an argument.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from grpo_core.deadline import Deadline
from grpo_core.redis.keys import run_prefix
from grpo_core.weights.versions import CHUNK_BYTES, FileName

BUCKET_BYTES = 8 * CHUNK_BYTES
ARRIVING = ".arriving"
"""Suffix of the name of a version's directory until the manifest in it is verified."""
NO_MORE = "none"
VERIFIED = "verified"
HELLO, MEMBERS = "hello", "members"
_POLL_S = 0.0005
_NCCL_ERRORS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
"""Otherwise PyTorch ends the process when a broadcast fails."""


class GroupAddress(BaseModel):
    """`host`, `port`: of the store. `silent_s`: after so long without an answer a peer is lost."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    host: str
    port: int
    token: str
    backend: Literal["gloo", "nccl"]
    silent_s: float


class Member(NamedTuple):
    """`worker`: of the server's `workers`, from 0 on."""

    server: str
    worker: int
    workers: int


class Offer(BaseModel):
    """`version`: its id; `files`: name → bytes, in the order in which they are sent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str
    files: dict[FileName, int]


def group_key(run_id: str) -> str:
    return run_prefix(run_id) + "weights:group"


def spans_of(size: int, portion: int) -> Iterator[slice]:
    """The portions of so many bytes, in order; the last one may be smaller."""
    return (slice(first, min(first + portion, size)) for first in range(0, size, portion))


def write_at(file: int, piece: memoryview, first: int) -> None:
    """Write all of it into the file of this descriptor. Raises `OSError`."""
    while piece:
        written = os.pwrite(file, piece, first)
        piece, first = piece[written:], first + written


def open_group(dist: Any, store: Any, rank: int, size: int, address: GroupAddress) -> Any:
    """This process's end of the process group, apart from all others of the process. Returns when
    all members are there."""
    if address.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=address.silent_s)
        with _variable(*_NCCL_ERRORS):
            return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=address.silent_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(address))]
    return dist.ProcessGroupGloo(store, rank, size, options)


def finished(work: Any, silent_s: float) -> None:
    """Wait for a broadcast. A wait of PyTorch for NCCL ends before the broadcast does.

    Raises:
        RuntimeError: a peer is gone.
        TimeoutError: a peer is silent.
    """
    deadline = Deadline(silent_s)
    while not work.is_completed():
        if deadline.has_passed:
            raise TimeoutError(f"no answer within {silent_s:g} s")
        time.sleep(_POLL_S)
    work.wait()


def _own_address(address: GroupAddress) -> str:
    """Of this host on the network of the store."""
    with socket.create_connection((address.host, address.port), address.silent_s) as reached:
        host: str = reached.getsockname()[0]
    return host


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


class Slot:
    """One of two buckets that take turns: one travels while the other's chunks are hashed and
    written. Args: buffer: of `BUCKET_BYTES`"""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.pending: list[Callable[[], Any]] = []

    def free(self) -> None:
        """Wait until nothing uses the buffer any more. Raises what that raises."""
        pending, self.pending = self.pending, []
        for wait in pending:
            wait()
