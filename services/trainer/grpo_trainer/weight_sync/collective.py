"""Sends versions of the weights through one process group of rank 0 and the workers of all servers.

Its twin is `grpo_vllm.engine.vllm_compat.collective`, their protocol in
`grpo_core.weights.collective`. Rank 0 alone sends, also with FSDP2: a tensor is collected from all
ranks first, because a server divides it in another way. The group is formed again when a server
joins, leaves or restarts its engine. A version whose transfer fails, and one that a server cannot
get from another one, is written as files.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import struct
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed
from torch import Tensor

from grpo_core.deadline import Deadline
from grpo_core.listening import EVERY_ADDRESS, LOOPBACK, listen
from grpo_core.security import is_loopback
from grpo_core.weights.collective import (
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
from grpo_core.weights.version_log import VersionLog
from grpo_core.weights.versions import (
    CHUNK_BYTES,
    MANIFEST,
    Announcement,
    FileParts,
    Manifest,
    VersionKind,
    sha256_of,
    version_id,
)
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.atomic_files import whole_directory
from grpo_trainer.errors import TransferFailed
from grpo_trainer.model.division import model_tensors, whole_tensors
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.model.policy import CausalLM, device_of
from grpo_trainer.weight_sync.directories import VersionDirectories
from grpo_trainer.weight_sync.servers import Servers, ServerWatch

log = structlog.get_logger()

dist: Any = torch.distributed
WEIGHTS = "model.safetensors"
JOIN_S = 10.0
"""Time for the workers of all servers to join; they look for a new group twice a second."""
_POLL_S = 0.02
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of data types in the header of a safetensors file."""


@dataclass(frozen=True)
class VersionFiles:
    """The files of a version: those below a directory, and the policy's weights, of which no second
    copy is made. `header`: of their file; b"" if the directory has all."""

    directory: Path
    policy: CausalLM
    header: bytes = b""

    @classmethod
    @contextlib.contextmanager
    def of(cls, weights: TrainedWeights, policy: CausalLM) -> Iterator[VersionFiles]:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            if weights.lora is not None:
                weights.write_into(policy, directory)
                yield cls(directory, policy)
            else:
                weights.write_configuration(policy, directory)
                yield cls(directory, policy, header_of(_in_order(model_tensors(policy))))

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file, by name."""
        found = {path.name: path.stat().st_size for path in sorted(self.directory.iterdir())}
        if self.header:
            tensors = model_tensors(self.policy).values()
            found[WEIGHTS] = len(self.header) + sum(each.nbytes for each in tensors)
        return found

    def read(self, name: str) -> Iterator[Tensor]:
        """The bytes of a file, in pieces of any size: [N] uint8."""
        if name != WEIGHTS or not self.header:
            yield _bytes_in((self.directory / name).read_bytes())
            return
        yield _bytes_in(self.header)
        tensors = model_tensors(self.policy)
        for size in sorted({each.itemsize for each in tensors.values()}, reverse=True):
            names = {name for name, each in tensors.items() if each.itemsize == size}
            for _, tensor in whole_tensors(self.policy, names):
                yield tensor.reshape(-1).contiguous().view(torch.uint8)


def header_of(tensors: Mapping[str, Tensor]) -> bytes:
    """The beginning of a safetensors file with these tensors in this order, of descending size of
    an element, so that each is aligned."""
    end, fields = 0, {"__metadata__": {"format": "pt"}}
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        shape, dtype = list(tensor.shape), _TYPES[tensor.dtype]
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}  # type: ignore[dict-item]
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _in_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))


def _bytes_in(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _on_host(bucket: Tensor) -> memoryview:
    values: Any = bucket.cpu().numpy()
    return memoryview(values)


class _Flow:
    """The pieces of a file as one sequence of bytes."""

    def __init__(self, pieces: Iterator[Tensor]) -> None:
        self._pieces = pieces
        self._rest = torch.empty(0, dtype=torch.uint8)

    def fill(self, target: Tensor) -> Tensor:
        """Copy the next bytes into all of `target`, which is returned."""
        at = 0
        while at < len(target):
            if not len(self._rest):
                self._rest = next(self._pieces)
                continue
            taken = self._rest[: len(target) - at]
            target[at : at + len(taken)].copy_(taken)
            self._rest, at = self._rest[len(taken) :], at + len(taken)
        return target


def read_once(
    files: VersionFiles,
    take: Callable[[str, int, Tensor], list[Callable[[], Any]]],
) -> Manifest:
    """Read all files, bucket by bucket, and compute their manifest.

    Args:
        take: gets the name of the file, the bucket's first byte and the bucket; returns what waits
            until the bucket is used no more
    """
    device = device_of(files.policy)
    slots = [Slot(torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=device)) for _ in range(2)]
    turns, parts = itertools.cycle(slots), {}
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for name, size in files.sizes.items():
            flow, digests = _Flow(files.read(name)), []
            for span in spans_of(size, BUCKET_BYTES):
                slot = next(turns)
                slot.free()
                bucket = flow.fill(slot.buffer[: span.stop - span.start])
                slot.pending += take(name, span.start, bucket)
                host = _on_host(bucket)
                own = [pool.submit(sha256_of, host[c]) for c in spans_of(len(host), CHUNK_BYTES)]
                slot.pending += [each.result for each in own]
                digests += own
            parts[name] = (size, digests)
        for slot in slots:
            slot.free()
    return Manifest(
        files={
            name: FileParts(bytes=size, chunks=tuple(each.result() for each in digests))
            for name, (size, digests) in parts.items()
        }
    )


class TransferGroup:
    """Rank 0 of a process group. Raises `TransferFailed` (every method).

    Args:
        host: name or address under which the workers reach this process
        device: of the weights
        silent_s: after so long without an answer a peer is lost
    """

    def __init__(self, host: str, device: torch.device, silent_s: float) -> None:
        is_local = is_loopback(host)
        listening = listen(LOOPBACK if is_local else EVERY_ADDRESS, 0)
        self.address = GroupAddress(
            host=LOOPBACK if is_local else host,
            port=listening.getsockname()[1],
            token=secrets.token_hex(16),
            backend="nccl" if device.type == "cuda" else "gloo",
            silent_s=silent_s,
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
        self._group: Any = None
        self._sent = 0
        self.members: list[Member] = []

    @property
    def servers(self) -> set[str]:
        return {member.server for member in self.members}

    def admit(self, expected: Collection[str], within_s: float = JOIN_S) -> None:
        """Wait for the workers of these servers, then connect to those that came."""
        deadline = Deadline(within_s)
        with _failing("form the process group"):
            while True:
                came = [self._member(i) for i in range(self._store.add(HELLO, 0))]
                whole = {m.server for m in came if _has_all(came, m)} & set(expected)
                if whole == set(expected) or deadline.has_passed:
                    break
                time.sleep(_POLL_S)
            self.members = [member for member in came if member.server in whole]
            self._store.set(MEMBERS, json.dumps(self.members))
            if self.members:
                count = len(self.members) + 1
                self._group = open_group(dist, self._store, 0, count, self.address)

    def send(self, version: PolicyVersion, files: VersionFiles) -> Manifest:
        """Returns the manifest when every worker has verified its part."""
        number, self._sent = self._sent, self._sent + 1
        offer = Offer(version=version_id(version), files=files.sizes)
        with _failing(f"bring policy version {offer.version} to {', '.join(sorted(self.servers))}"):
            self._store.set(f"offer/{number}", offer.model_dump_json())
            manifest = read_once(files, self._broadcast)
            text = manifest.model_dump_json(exclude_defaults=True)
            self._store.set(f"manifest/{number}", text)
            keys = [f"done/{number}/{rank}" for rank in range(1, len(self.members) + 1)]
            for member, key in zip(self.members, keys, strict=True):
                if (told := self._store.get(key).decode()) != VERIFIED:
                    raise TransferFailed(f"worker {member.worker} of {member.server}: {told}")
        return manifest

    def leave(self) -> None:
        """Tell the other members that nothing follows. After a failure they may be gone."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"offer/{self._sent}", NO_MORE)

    def _broadcast(self, _name: str, _first: int, bucket: Tensor) -> list[Callable[[], Any]]:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        work = self._group.broadcast([bucket], options)
        return [partial(finished, work, self.address.silent_s)]

    def _member(self, number: int) -> Member:
        return Member(*json.loads(self._store.get(f"{HELLO}/{number + 1}")))


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:  # of torch.distributed: a peer is gone or silent
        raise TransferFailed(f"cannot {what}: {' '.join(str(error).split())}") from error


def _has_all(came: Collection[Member], member: Member) -> bool:
    return sum(other.server == member.server for other in came) == member.workers


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
        self._lives: dict[str, tuple[float, int]] = {}
        if not is_loopback(host):
            log.warning(
                "transfer_group.unprotected",
                effect="anyone who reaches its ports can read the weights",
                hint="keep trainer and inference servers in a private network",
            )

    def write(
        self, version: PolicyVersion, weights: TrainedWeights, policy: CausalLM
    ) -> Announcement:
        """Send the version to all servers that serve.

        Raises:
            CheckpointNotSaved: the transfer failed, and then a file could not be written.
        """
        try:
            group = self._group_with(self._watch.servers(), device_of(policy))
            if group is not None:
                began = time.monotonic()
                with VersionFiles.of(weights, policy) as files:
                    manifest = group.send(version, files)
                log.info(
                    "weights.sent",
                    policy_version=tuple(version),
                    servers=sorted(group.servers),
                    bytes=manifest.full_bytes,
                    seconds=round(time.monotonic() - began, 3),
                )
                return _announcement(version, weights, manifest)
            reason = "no server is in the process group"
        except TransferFailed as error:
            self.close()
            reason = f"{type(error).__name__}: {error}"
        return self.write_files(version, weights, policy, reason)

    def write_files(
        self, version: PolicyVersion, weights: TrainedWeights, policy: CausalLM, reason: str
    ) -> Announcement:
        """Write the same bytes into a directory. Raises `CheckpointNotSaved`."""
        self._watch.by_files += 1
        log.warning("weights.by_files", policy_version=tuple(version), reason=reason)
        with (
            VersionFiles.of(weights, policy) as files,
            whole_directory(self.path_of(version)) as directory,
            contextlib.ExitStack() as stack,
        ):
            opened = {
                name: stack.enter_context((directory / name).open("wb")).fileno()
                for name in files.sizes
            }

            def take(name: str, first: int, bucket: Tensor) -> list[Callable[[], Any]]:
                write_at(opened[name], _on_host(bucket), first)
                return []

            manifest = read_once(files, take)
            text = manifest.model_dump_json(exclude_defaults=True)
            (directory / MANIFEST).write_text(text)
        return _announcement(version, weights, manifest)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.leave()
        self._group, self._lives = None, {}

    def _group_with(self, servers: Servers, device: torch.device) -> TransferGroup | None:
        """The group of all servers that serve, formed again if these are others than before; None
        if none of them joins."""
        lives = {name: (one.started, one.engine_pid) for name, one in servers.items() if one.serves}
        if lives == self._lives:
            return self._group
        self.close()
        group = TransferGroup(self._host, device, self._silent_s)
        versions: VersionLog = self._watch.versions
        versions.invite(group.address)
        group.admit(lives.keys())
        outside = sorted(lives.keys() - group.servers)
        told: dict[str, Any] = {"backend": group.address.backend, "members": group.members}
        if outside:
            log.warning("transfer_group.formed", outside=outside, **told)
        else:
            log.info("transfer_group.formed", **told)
        self._group, self._lives = group if group.members else None, lives
        return self._group


def _announcement(
    version: PolicyVersion, weights: TrainedWeights, manifest: Manifest
) -> Announcement:
    return Announcement(
        **version.fields(),
        kind=VersionKind.FULL if weights.lora is None else VersionKind.ADAPTER,
        digest=manifest.digest,
        manifest_sha256=sha256_of(manifest.model_dump_json(exclude_defaults=True).encode()),
        bytes=manifest.full_bytes,
    )
