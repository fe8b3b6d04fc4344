"""How versions travel through a process group of the trainer's rank 0 and the servers' workers.

The trainer records the newest group in Redis, below the run's prefix:

    weights:group       `GroupAddress` as JSON

Its store, which the trainer keeps, has these keys below the address's token:

    here/<rank>         this member reaches the store
    offer/<n>           `Offer` of the n-th version; broadcasts of its files in buckets follow
    manifest/<n>        its manifest
    done/<n>/<rank>     `VERIFIED`, or the reason why this worker has left

The workers of a server fill one directory: worker k of n writes and verifies the chunks k, k + n, …
of each file. Then the trainer announces the version, with the digest of the manifest.

This package imports no torch, so functions take `torch.distributed` as an argument.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any, Literal

from pydantic import BaseModel

from grpo_core.deadline import Deadline
from grpo_core.redis.keys import run_prefix
from grpo_core.weights.versions import CHUNK_BYTES, FileName

BUCKET_BYTES = 8 * CHUNK_BYTES
ARRIVING = ".arriving"
"""Suffix of the name of a version's directory that workers fill; it is whole with its manifest."""
VERIFIED = "verified"
_POLL_S = 0.0005
_NCCL_ERRORS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
"""Otherwise PyTorch ends the process when a broadcast fails."""


class GroupAddress(BaseModel, frozen=True, extra="ignore"):
    """`host`, `port`: of the store; `silent_s`: after so long without an answer a peer is lost;
    `size`: number of members; `servers`: name → process id of the engine, rank of its first
    worker."""

    host: str
    port: int
    token: str
    backend: Literal["gloo", "nccl"]
    silent_s: float
    size: int
    servers: dict[str, tuple[int, int]]


class Offer(BaseModel):
    """`version`: its id; `files`: name → bytes, in the order in which they are sent."""

    version: str
    files: dict[FileName, int]


def group_key(run_id: str) -> str:
    return run_prefix(run_id) + "weights:group"


def open_group(dist: Any, store: Any, rank: int, address: GroupAddress) -> Any:
    """This process's end of the process group, apart from all others of the process. Returns when
    all members are there. Raises `RuntimeError`: one of them is not within `silent_s`."""
    within = timedelta(seconds=address.silent_s)
    store.set(f"here/{rank}", "")
    if address.backend == "nccl":
        # NCCL connects at the first broadcast, which would wait for a member without a limit.
        store.wait([f"here/{member}" for member in range(address.size)], within)
        os.environ.setdefault(*_NCCL_ERRORS)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = within
        return dist.ProcessGroupNCCL(store, rank, address.size, options)
    with socket.create_connection((address.host, address.port), address.silent_s) as reached:
        own_host = reached.getsockname()[0]  # on the network of the store
    options = dist.ProcessGroupGloo._Options()
    options._timeout = within
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]
    return dist.ProcessGroupGloo(store, rank, address.size, options)


def broadcast(dist: Any, group: Any, bucket: Any, silent_s: float) -> None:
    """Send or receive a bucket of rank 0. PyTorch's own wait for NCCL ends too early.

    Raises:
        RuntimeError: a peer is gone.
        TimeoutError: a peer is silent.
    """
    options = dist.BroadcastOptions()
    options.rootRank = 0
    work, deadline = group.broadcast([bucket], options), Deadline(silent_s)
    while not work.is_completed():
        if deadline.has_passed:
            raise TimeoutError(f"no answer within {silent_s:g} s")
        time.sleep(_POLL_S)
    work.wait()
