"""Receives versions of the weights in a worker, through the trainer's process group.

Its twin is `grpo_trainer.weight_sync.collective`, their protocol in `grpo_core.weights.collective`.
A thread of its own receives, so the engine goes on. It fills a directory of the server's staging
and touches no weights: the supervisor commits the version when the trainer has announced it.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch

from grpo_core.weights.collective import (
    ARRIVING,
    BUCKET_BYTES,
    HELLO,
    MEMBERS,
    NO_MORE,
    VERIFIED,
    GroupAddress,
    Member,
    Offer,
    Slot,
    finished,
    open_group,
    spans_of,
    write_at,
)
from grpo_core.weights.versions import CHUNK_BYTES, MANIFEST, Manifest, sha256_of

log = structlog.get_logger()

ASK_AGAIN_S = 0.03
SOURCE_RANK = 0


class Receiver(threading.Thread):
    """One worker's part in one process group, until the group ends.

    Args:
        address: of the group's store
        own: this worker
        staging: the server's directory for copies
        device: of the worker
    """

    def __init__(
        self, address: GroupAddress, own: Member, staging: Path, device: torch.device
    ) -> None:
        super().__init__(name="weight-receiver", daemon=True)
        self._address = address
        self._own = own
        self._staging = staging
        self._device = device if address.backend == "nccl" else torch.device("cpu")
        self._ended = threading.Event()
        self._problem = ""

    def leave(self) -> None:
        """End soon; a transfer that has begun ends with its group."""
        self._ended.set()

    def run(self) -> None:
        try:
            self._take_part()
        except (RuntimeError, OSError, ValueError) as error:
            # The trainer ended or formed another group, or a peer is gone.
            reason = " ".join(str(error).split())
            log.warning("transfer_group.left", worker=self._own.worker, reason=reason)

    def _take_part(self) -> None:
        if self._address.backend == "nccl" and self._device.type != "cuda":
            raise ValueError("the trainer's group uses NCCL, but this worker has no GPU")
        dist: Any = torch.distributed
        within = timedelta(seconds=self._address.silent_s)
        host, port = self._address.host, self._address.port
        reached = dist.TCPStore(host, port, timeout=within, wait_for_workers=False)
        store = dist.PrefixStore(self._address.token, reached)
        store.set(f"{HELLO}/{store.add(HELLO, 1)}", json.dumps(self._own))
        members = [Member(*each) for each in json.loads(store.get(MEMBERS))]
        if self._own not in members:
            raise ValueError("this worker came too late; the trainer's next group may have it")
        rank = 1 + members.index(self._own)
        group = open_group(dist, store, rank, 1 + len(members), self._address)
        log.info("transfer_group.joined", rank=rank, size=1 + len(members))
        for number in itertools.count():
            told = self._awaited(store, f"offer/{number}")
            if told == NO_MORE:
                return
            offer = Offer.model_validate_json(told)
            directory = self._staging / (offer.version + ARRIVING)
            try:
                self._receive(dist, group, store, number, offer, directory)
                peers = [r for r, m in enumerate(members, 1) if m.server == self._own.server]
                if not (self._problem or self._own.worker):
                    self._finish(store, number, [r for r in peers if r != rank], directory)
                store.set(f"done/{number}/{rank}", self._problem or VERIFIED)
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)
                raise

    def _awaited(self, store: Any, key: str) -> str:
        """Wait for the next offer. `NO_MORE` if this worker is to leave."""
        # A thread that waits inside PyTorch aborts a process that ends.
        while not self._ended.wait(ASK_AGAIN_S):
            if store.check([key]):
                offer: bytes = store.get(key)
                return offer.decode()
        return NO_MORE

    def _receive(
        self, dist: Any, group: Any, store: Any, number: int, offer: Offer, directory: Path
    ) -> None:
        """Receive all files, write this worker's chunks of them, and compare these with the
        manifest. A worker that cannot write goes on receiving, because the others depend on it."""
        self._problem = ""
        options = dist.BroadcastOptions()
        options.rootRank = SOURCE_RANK
        slots = [Slot(torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=self._device))]
        slots.append(Slot(torch.empty_like(slots[0].buffer)))
        turns = itertools.cycle(slots)
        digests: dict[tuple[str, int], str] = {}
        with ExitStack() as stack:
            files = self._opened(stack, offer, directory)
            pool = stack.enter_context(ThreadPoolExecutor(max_workers=1))
            for name, size in offer.files.items():
                for span in spans_of(size, BUCKET_BYTES):
                    slot = next(turns)
                    slot.free()
                    bucket = slot.buffer[: span.stop - span.start]
                    finished(group.broadcast([bucket], options), self._address.silent_s)
                    host: Any = bucket.cpu().numpy()
                    keep = partial(self._keep, files, name, span.start, memoryview(host), digests)
                    slot.pending.append(pool.submit(keep).result)
            for slot in slots:
                slot.free()
        manifest = Manifest.model_validate_json(store.get(f"manifest/{number}"))
        wrong = [
            at for at, digest in digests.items() if manifest.files[at[0]].chunks[at[1]] != digest
        ]
        if wrong and not self._problem:
            name, chunk = wrong[0]
            self._problem = f"{name}: wrong digest of chunk {chunk}, and of {len(wrong) - 1} more"

    def _opened(self, stack: ExitStack, offer: Offer, directory: Path) -> dict[str, int]:
        """Descriptors of the files, by name."""
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            how = os.O_WRONLY | os.O_CREAT
            files = {name: os.open(directory / name, how, 0o600) for name in offer.files}
        except OSError as error:
            self._problem = str(error)
            return {}
        for file in files.values():
            stack.callback(os.close, file)
        return files

    def _keep(
        self,
        files: dict[str, int],
        name: str,
        first: int,
        bucket: memoryview,
        digests: dict[tuple[str, int], str],
    ) -> None:
        """Write and hash this worker's chunks of a bucket."""
        for span in spans_of(len(bucket), CHUNK_BYTES):
            chunk = (first + span.start) // CHUNK_BYTES
            if self._problem or chunk % self._own.workers != self._own.worker:
                continue
            digests[name, chunk] = sha256_of(bucket[span])
            try:
                write_at(files[name], bucket[span], first + span.start)
            except OSError as error:
                self._problem = str(error)

    def _finish(self, store: Any, number: int, peers: list[int], directory: Path) -> None:
        """Complete the directory with its manifest, when the server's other workers have verified
        theirs."""
        for rank in peers:
            if store.get(f"done/{number}/{rank}").decode() != VERIFIED:
                self._problem = f"the server's worker of rank {rank} has no complete copy"
                return
        (directory / MANIFEST).write_bytes(store.get(f"manifest/{number}"))
