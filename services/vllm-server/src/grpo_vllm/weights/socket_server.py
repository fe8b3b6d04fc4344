"""Hands the weight memory to trainers over a unix socket (twin: `grpo_core.weights.socket`), which
`vllm_bridge_config.json` announces.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from grpo_core.errors import GrpoError
from grpo_core.weights.bridge_config import (
    BridgeConfig,
    BridgeConfigUnreadable,
    BridgeConfigUnwritable,
    read_bridge_config,
    write_bridge_config,
)
from grpo_core.weights.manifest import WeightManifest
from grpo_core.weights.memory_grant import CudaMemory, MemfdMemory, WeightGrant
from grpo_core.weights.socket import send_grant, send_refusal
from grpo_vllm.engine.engine_client import EngineTimeout
from grpo_vllm.weights.write_lease import BridgeConflict, WeightBridge

log = structlog.get_logger()

SEND_TIMEOUT_S = 10.0
ACCEPT_RETRY_S = 1.0


class SocketTaken(GrpoError):
    """The path of the weight socket is in use."""


class UnsafeSocketDirectory(GrpoError):
    """Others could put a socket of theirs in the place of ours."""


class NotExported(GrpoError):
    """The worker cannot give its memory to this consumer. The message says why."""


@dataclass(frozen=True)
class ExportedWeights:
    """`manifest`: what lies where. `fd`: this process's descriptor of the worker's arena; None on a
    GPU, where the worker exports its memory anew for every trainer."""

    engine: Any
    manifest: WeightManifest
    fd: int | None

    async def grant(self, session: str) -> tuple[WeightGrant, int | None]:
        """For one trainer: the record, and the descriptor that goes with it.

        Raises:
            NotExported: not now.
        """
        memory: MemfdMemory | CudaMemory = MemfdMemory()
        if self.fd is None:
            (answer,) = await self.engine.collective_rpc("export_weights")
            if "refused" in answer:
                raise NotExported(answer["refused"])
            memory = CudaMemory.model_validate_json(answer["memory"])
        return WeightGrant(session=session, manifest=self.manifest, memory=memory), self.fd


async def exported_by_worker(engine: Any) -> ExportedWeights:
    """Ask the worker process, which is our child, for what it shares.

    Raises:
        OSError: the worker's descriptor cannot be opened.
    """
    (worker,) = await engine.collective_rpc("describe_weights")
    manifest = WeightManifest.model_validate_json(worker["manifest"])
    fd = None
    if "fd" in worker:
        fd = os.open(f"/proc/{worker['pid']}/fd/{worker['fd']}", os.O_RDWR | os.O_CLOEXEC)
    return ExportedWeights(engine, manifest, fd)


@contextlib.asynccontextmanager
async def serve_weights(
    path: Path, weights: ExportedWeights, bridge: WeightBridge
) -> AsyncIterator[None]:
    """Grant the memory to whoever connects at `path` (mode 0600) while the context is open.

    Raises:
        SocketTaken, UnsafeSocketDirectory: not there.
    """
    listener = _listen(path)
    grants: set[asyncio.Task[None]] = set()
    accepting = asyncio.create_task(_accept(listener, weights, bridge, grants))
    try:
        yield
    finally:
        accepting.cancel()
        for task in grants:
            task.cancel()
        await asyncio.gather(accepting, *grants, return_exceptions=True)
        listener.close()
        path.unlink(missing_ok=True)


def _listen(path: Path) -> socket.socket:
    make_private_directory(path.parent)
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen()
    listener.setblocking(False)
    return listener


def _remove_stale(path: Path) -> None:
    """Clear away what a server that was killed left behind, and nothing else.

    Raises:
        SocketTaken: a living server listens there, or it is no socket.
    """
    if not path.exists():
        return
    if not path.is_socket():
        raise SocketTaken(f"--weights-socket {path}: a file of another kind; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise SocketTaken(
                f"--weights-socket {path}: another server listens there; choose another path"
            )


async def _accept(
    listener: socket.socket,
    weights: ExportedWeights,
    bridge: WeightBridge,
    grants: set[asyncio.Task[None]],
) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError as error:  # no descriptor left: other connections will close
            log.warning("cannot accept a trainer", error=str(error))
            await asyncio.sleep(ACCEPT_RETRY_S)
            continue
        task = asyncio.create_task(_serve_trainer(connection, weights, bridge))
        grants.add(task)
        task.add_done_callback(grants.discard)


async def _serve_trainer(
    connection: socket.socket, weights: ExportedWeights, bridge: WeightBridge
) -> None:
    """Send the grant, then hold the session until the other end closes."""
    connection.settimeout(SEND_TIMEOUT_S)
    session = None
    try:
        session = await bridge.open_session()
        grant, fd = await weights.grant(session)
        await asyncio.to_thread(send_grant, connection, grant, fd)
        connection.setblocking(False)
        while await asyncio.get_running_loop().sock_recv(connection, 1):
            pass  # the protocol has nothing for a trainer to say; only the end matters
    except (BridgeConflict, NotExported) as error:
        await asyncio.to_thread(send_refusal, connection, str(error))
    except EngineTimeout as error:
        log.error("bridge broken", error=str(error))
    except OSError as error:
        log.warning("weight connection broke", session=session, error=str(error))
    finally:
        connection.close()
        if session is not None:
            await bridge.close_session(session)


def make_private_directory(directory: Path) -> None:
    """Make it, where it is not there. Raises `UnsafeSocketDirectory`."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    mode, own = stat.S_IMODE(found.st_mode), os.getuid()
    if found.st_uid != own or mode & 0o077:
        raise UnsafeSocketDirectory(
            f"--weights-socket: {directory} belongs to user {found.st_uid} with mode {mode:04o}, "
            f"and others than user {own} must not enter it; name a directory that is not there "
            "yet, or give this one to that user and chmod 700"
        )


@contextlib.contextmanager
def bridge_config_written(config: BridgeConfig, path: Path, required: bool) -> Iterator[None]:
    """The file is there inside the context, unless another server replaces it.

    Raises:
        BridgeConfigUnwritable: it is required and cannot be written.
    """
    _log_replaced(path)
    try:
        write_bridge_config(config, path)
    except BridgeConfigUnwritable as error:
        if required:
            raise
        # Trainers ask the server itself first; the file is for those on another file system.
        log.warning("going on without a bridge config", reason=str(error))
        yield
        return
    log.info("wrote the bridge config", path=str(path.absolute()))
    try:
        yield
    finally:
        _remove_if_own(path, config.generation)


def _log_replaced(path: Path) -> None:
    with contextlib.suppress(BridgeConfigUnreadable):
        other = read_bridge_config(path)
        log.warning(
            "replacing the bridge config of another server, or of one that was killed",
            path=str(path.absolute()),
            model=other.model,
            generation=other.generation,
            weights_socket=str(other.weights_socket),
        )


def _remove_if_own(path: Path, generation: str) -> None:
    with contextlib.suppress(BridgeConfigUnreadable):
        if read_bridge_config(path).generation == generation:
            path.unlink(missing_ok=True)
