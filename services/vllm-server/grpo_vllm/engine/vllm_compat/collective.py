"""Receives versions of the weights in a worker, through the trainer's process group.

Its twin is `grpo_trainer.weight_sync.collective`, their protocol in `grpo_core.weights.collective`.
A thread of its own receives, so the engine goes on. It fills a directory of the server's staging
and touches no weights: the supervisor commits the version when the trainer has announced it.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import structlog
import torch

from grpo_core.weights.collective import (
    ARRIVING,
    BUCKET_BYTES,
    VERIFIED,
    GroupAddress,
    Offer,
    broadcast,
    open_group,
)
from grpo_core.weights.directory_checks import make_private
from grpo_core.weights.versions import CHUNK_BYTES, MANIFEST, Manifest, WrongDigest, sha256_of

log = structlog.get_logger()

dist: Any = torch.distributed
ASK_AGAIN_S = 0.03


class Receiver(threading.Thread):
    """One worker's part in one process group, until the group ends.

    Args:
        address: of the group's store
        first_rank: of the server's workers
        worker, workers: number of this one, and how many the server has
        staging: the server's directory for copies
        device: of the worker
    """

    def __init__(
        self,
        address: GroupAddress,
        first_rank: int,
        worker: int,
        workers: int,
        staging: Path,
        device: torch.device,
    ) -> None:
        super().__init__(name="weight-receiver", daemon=True)
        self._address = address
        self._ranks = range(first_rank, first_rank + workers)
        self._worker = worker
        self._staging = staging
        place = device if address.backend == "nccl" else torch.device("cpu")
        # One is written while the other is received.
        self._buckets = [torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=place) for _ in "12"]
        self._ended = threading.Event()

    def leave(self) -> None:
        """End soon; a transfer that has begun ends with its group."""
        self._ended.set()

    def run(self) -> None:
        place, within = (self._address.host, self._address.port), self._address.silent_s
        try:
            store = dist.TCPStore(*place, timeout=timedelta(seconds=within), wait_for_workers=False)
            self._take_part(dist.PrefixStore(self._address.token, store))
        except (RuntimeError, OSError, ValueError, WrongDigest) as error:
            # The trainer ended or formed another group, a peer is gone, or there is no room.
            reason = " ".join(str(error).split())
            log.warning("transfer_group.left", worker=self._worker, reason=reason)

    def _take_part(self, store: Any) -> None:
        rank = self._ranks[self._worker]
        group = open_group(dist, store, rank, self._address)
        log.info("transfer_group.joined", rank=rank, size=self._address.size)
        for number in itertools.count():
            # A thread that waits inside PyTorch aborts a process that ends.
            while not store.check([f"offer/{number}"]):
                if self._ended.wait(ASK_AGAIN_S):
                    return
            offer = Offer.model_validate_json(store.get(f"offer/{number}"))
            directory = self._staging / (offer.version + ARRIVING)
            try:
                self._receive(group, store, number, offer, directory)
            except BaseException as error:
                shutil.rmtree(directory, ignore_errors=True)
                store.set(f"done/{number}/{rank}", str(error))
                raise
            store.set(f"done/{number}/{rank}", VERIFIED)

    def _receive(self, group: Any, store: Any, number: int, offer: Offer, directory: Path) -> None:
        """Receive all files, write this worker's chunks of them, and compare these with the
        manifest. Worker 0 completes the directory when the others have verified theirs."""
        make_private(self._staging)
        directory.mkdir(mode=0o700, exist_ok=True)
        digests: dict[tuple[str, int], str] = {}
        for name, size in offer.files.items():
            path = directory / name
            path.touch(mode=0o600)
            with path.open("r+b") as file, ThreadPoolExecutor(1) as pool:
                writing: list[Future[dict[int, str]]] = []
                for turn, first in enumerate(range(0, size, BUCKET_BYTES)):
                    bucket = self._buckets[turn % 2][: size - first]
                    if turn > 1:
                        writing[-2].result()
                    broadcast(dist, group, bucket, self._address.silent_s)
                    writing.append(pool.submit(self._write, file, bucket, first))
                for written in writing:
                    digests |= {(name, chunk): sha for chunk, sha in written.result().items()}
        text = store.get(f"manifest/{number}")
        files = Manifest.model_validate_json(text).files
        if wrong := [at for at, digest in digests.items() if files[at[0]].chunks[at[1]] != digest]:
            raise WrongDigest(f"chunks arrived with a wrong digest: {wrong}")
        if self._worker == 0:
            for rank in self._ranks[1:]:
                if (told := store.get(f"done/{number}/{rank}").decode()) != VERIFIED:
                    raise ValueError(f"the worker of rank {rank} has no copy: {told}")
            (directory / MANIFEST).write_bytes(text)

    def _write(self, file: BinaryIO, bucket: torch.Tensor, first: int) -> dict[int, str]:
        """Write this worker's chunks of the bytes from `first` on; returns their digests."""
        host, digests = bucket.cpu().numpy().data, dict[int, str]()
        for at in range(0, len(host), CHUNK_BYTES):
            chunk = (first + at) // CHUNK_BYTES
            if chunk % len(self._ranks) == self._worker:
                own = host[at : at + CHUNK_BYTES]
                digests[chunk] = sha256_of(own)
                file.seek(first + at)
                file.write(own)
        return digests
