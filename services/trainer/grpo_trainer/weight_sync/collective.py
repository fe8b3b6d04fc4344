"""Sends versions of the weights through one process group of rank 0 and the workers of all servers.

Its twin is `grpo_vllm.engine.vllm_compat.collective`, their protocol in
`grpo_core.weights.collective`. Rank 0 alone sends, also with FSDP2: a tensor is collected from all
ranks first, because a server divides it in another way. The group is formed again when a server
joins, leaves or restarts its engine; until then, a server that did not join is left out. A version
whose transfer fails, and one that a server asks for, is written as files.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import structlog
import torch.distributed
from torch import Tensor

from grpo_core.listening import EVERY_ADDRESS, LOOPBACK, listen
from grpo_core.security import is_loopback
from grpo_core.weights.collective import (
    BUCKET_BYTES,
    VERIFIED,
    GroupAddress,
    Offer,
    broadcast,
    open_group,
)
from grpo_core.weights.versions import (
    CHUNK_BYTES,
    Announcement,
    FileParts,
    Manifest,
    sha256_of,
    version_id,
)
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.model.policy import CausalLM, device_of
from grpo_trainer.model.weights_file import WEIGHTS, weights_file
from grpo_trainer.weight_sync.directories import VersionDirectories, announcement_of
from grpo_trainer.weight_sync.servers import ServerWatch

log = structlog.get_logger()

dist: Any = torch.distributed
Streams = Mapping[str, tuple[int, Iterator[Tensor]]]
"""Of the files of a version, by name: bytes, and the content in pieces, [N] uint8."""


class TransferGroup:
    """Rank 0 of a process group. Every method raises `RuntimeError` or `OSError` if a peer is gone
    or silent.

    Args:
        host: name or address under which the workers reach this process
        device: of the weights
        backend: "nccl", if all workers have GPUs too, or "gloo"
        silent_s: after so long without an answer a peer is lost
        servers: name → process id of the engine, number of its workers
    """

    def __init__(
        self,
        host: str,
        device: torch.device,
        backend: str,
        silent_s: float,
        servers: Mapping[str, tuple[int, int]],
    ) -> None:
        is_local, self._silent_s, self._sent = is_loopback(host), silent_s, 0
        listening = listen(LOOPBACK if is_local else EVERY_ADDRESS, 0)
        ranks, size = dict[str, tuple[int, int]](), 1
        for name, (pid, workers) in servers.items():
            ranks[name], size = (pid, size), size + workers
        self.address = GroupAddress(
            host=LOOPBACK if is_local else host,
            port=listening.getsockname()[1],
            token=secrets.token_hex(16),
            backend=backend,
            silent_s=silent_s,
            size=size,
            servers=ranks,
        )
        store = dist.TCPStore(
            self.address.host,
            self.address.port,
            is_master=True,
            timeout=timedelta(seconds=silent_s),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        self._store = dist.PrefixStore(self.address.token, store)
        place = device if backend == "nccl" else "cpu"
        self._bucket = torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=place)

    def connect(self) -> None:
        """Wait until all workers have joined."""
        self._group = open_group(dist, self._store, 0, self.address)

    def absent(self) -> set[str]:
        """Names of the servers that have not reached this process."""
        servers = self.address.servers.items()
        return {name for name, (_, rank) in servers if not self._store.check([f"here/{rank}"])}

    def send(self, version: PolicyVersion, files: Streams) -> Manifest:
        """Returns the manifest when every worker has verified its part."""
        number, self._sent = self._sent, self._sent + 1
        offer = Offer(
            version=version_id(version), files={n: size for n, (size, _) in files.items()}
        )
        self._store.set(f"offer/{number}", offer.model_dump_json())
        parts = {}
        with ThreadPoolExecutor() as pool:
            for name, (size, pieces) in files.items():
                digests: list[str] = []
                for bucket in _buckets(pieces, self._bucket):
                    host = bucket.cpu().numpy().data
                    firsts = range(0, len(host), CHUNK_BYTES)
                    hashing = pool.map(sha256_of, [host[i : i + CHUNK_BYTES] for i in firsts])
                    broadcast(dist, self._group, bucket, self._silent_s)
                    digests += hashing
                parts[name] = FileParts(bytes=size, chunks=tuple(digests))
        manifest = Manifest(files=dict(sorted(parts.items())))  # as of a directory
        self._store.set(f"manifest/{number}", manifest.text)
        for rank in range(1, self.address.size):
            if (told := self._store.get(f"done/{number}/{rank}").decode()) != VERIFIED:
                raise RuntimeError(f"the worker of rank {rank} has no copy: {told}")
        self._store.delete_key(f"manifest/{number}")  # of a large model 100 kB and more
        return manifest


def _buckets(pieces: Iterator[Tensor], bucket: Tensor) -> Iterator[Tensor]:
    """The pieces as one sequence of bytes, one bucket at a time, in this memory."""
    filled = 0
    for piece in pieces:
        while len(piece):
            taken = piece[: len(bucket) - filled]
            bucket[filled : filled + len(taken)].copy_(taken)
            piece, filled = piece[len(taken) :], filled + len(taken)
            if filled == len(bucket):
                yield bucket
                filled = 0
    if filled:
        yield bucket[:filled]


class CollectiveDirectories(VersionDirectories):
    """Brings versions to the servers through a process group. Directories are written only if that
    fails, or if a server asks.

    Args:
        root: the directory of all versions
        watch: sees the servers
        host: under which the servers reach this process
        silent_s: after so long without an answer a transfer fails
    """

    def __init__(self, root: Path, watch: ServerWatch, host: str, silent_s: float) -> None:
        super().__init__(root)
        self._watch = watch
        self._host = host
        self._silent_s = silent_s
        self._group: TransferGroup | None = None
        self._engines: dict[str, tuple[int, int]] = {}
        self._absent: set[str] = set()
        if not is_loopback(host):
            log.warning(
                "transfer_group.unprotected",
                effect="anyone who reaches its ports can read the weights",
                hint="keep trainer and inference servers in a private network",
            )

    def write(
        self, version: PolicyVersion, weights: TrainedWeights, policy: CausalLM, reason: str = ""
    ) -> Announcement:
        """Send the version to all servers that serve. If that fails, or if there is a reason for
        files, write the same bytes. Raises `CheckpointNotSaved`: a file could not be written."""
        if not reason:
            try:
                return self._sent(version, weights, policy)
            except (RuntimeError, OSError) as error:
                reason = " ".join(str(error).split())
            # Not earlier: the error holds what it happened to, and the peers wait for its end.
            self.close()
        self._watch.by_files += 1
        log.warning("weights.by_files", policy_version=tuple(version), reason=reason)
        return super().write(version, weights, policy)

    def close(self) -> None:
        """Leave the group, which ends it for all members."""
        self._group = None

    def _sent(
        self, version: PolicyVersion, weights: TrainedWeights, policy: CausalLM
    ) -> Announcement:
        began, group = time.monotonic(), self._group_of_all(device_of(policy))
        with tempfile.TemporaryDirectory() as name:
            manifest = group.send(version, streams_of(weights, policy, Path(name)))
        log.info(
            "weights.sent",
            policy_version=tuple(version),
            servers=sorted(group.address.servers),
            bytes=manifest.full_bytes,
            seconds=round(time.monotonic() - began, 3),
        )
        return announcement_of(version, weights, manifest)

    def _group_of_all(self, device: torch.device) -> TransferGroup:
        """The group of all servers that serve, formed again if these are others than before."""
        serving = {name: one for name, one in self._watch.servers().items() if one.serves}
        engines = {n: (s.engine_pid, s.workers) for n, s in serving.items() if s.workers}
        if engines != self._engines:
            self.close()
            self._engines, self._absent = engines, set()
        if self._group is None:
            members = {n: one for n, one in engines.items() if n not in self._absent}
            if not members:
                raise RuntimeError("no server can join a process group")
            all_have_gpus = {device.type, *(one.device for one in serving.values())} == {"cuda"}
            backend = "nccl" if all_have_gpus else "gloo"
            group = TransferGroup(self._host, device, backend, self._silent_s, members)
            self._watch.versions.invite(group.address)
            try:
                group.connect()
            except (RuntimeError, OSError):
                self._absent |= group.absent() or members.keys()
                log.warning("transfer_group.absent", servers=sorted(self._absent))
                raise
            outside = sorted(serving.keys() - members.keys())
            log.info(
                "transfer_group.formed", backend=backend, members=sorted(members), outside=outside
            )
            self._group = group
        return self._group


def streams_of(weights: TrainedWeights, policy: CausalLM, directory: Path) -> Streams:
    """Args: directory: for the small files"""
    weights.write_into(policy, directory, with_weights=weights.lora is not None)
    streams = dict[str, tuple[int, Iterator[Tensor]]]()
    for path in directory.iterdir():
        content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        streams[path.name] = (len(content), iter([content]))
    return streams if weights.lora else streams | {WEIGHTS: weights_file(policy)}
