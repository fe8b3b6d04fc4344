"""Gives trainers access to the shared memory over a unix socket, and writes the bridge config.

The bridge config (`vllm_bridge_config.json`) names the socket. The trainer's side of the protocol
is `grpo_core.weights.socket`.
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
from grpo_core.weights.shared_memory import CudaMemory, MemfdMemory, WeightGrant, WeightManifest
from grpo_core.weights.socket import send_grant, send_refusal
from grpo_vllm.engine.control import EngineTimeout
from grpo_vllm.weights.write_lease import BridgeConflict, WeightBridge

log = structlog.get_logger()

SEND_TIMEOUT_S = 10.0
ACCEPT_RETRY_S = 1.0


class SocketTaken(GrpoError):
    """Another process uses the path of the weight socket."""


class UnsafeSocketDirectory(GrpoError):
    """The directory of the weight socket lets other users replace the socket."""


class NotExported(GrpoError):
    """The engine cannot share its weights with a trainer. The message gives the reason."""


@dataclass(frozen=True)
class ExportedWeights:
    """`manifest`: the place of every parameter. `fd`: this process's descriptor of the worker's
    arena; None on a GPU, because the worker makes a new export for every trainer."""

    engine: Any
    manifest: WeightManifest
    fd: int | None

    async def grant(self, session: str) -> tuple[WeightGrant, int | None]:
        """The grant for one trainer, and the descriptor to send with it. Raises `NotExported` if
        the worker cannot export its memory now."""
        memory: MemfdMemory | CudaMemory = MemfdMemory()
        if self.fd is None:
            (answer,) = await self.engine.collective_rpc("export_weights")
            if "refused" in answer:
                raise NotExported(answer["refused"])
            memory = CudaMemory.model_validate_json(answer["memory"])
        return WeightGrant(session=session, manifest=self.manifest, memory=memory), self.fd


async def exported_by_worker(engine: Any) -> ExportedWeights:
    """Get the description of the shared memory from the worker, which is a child process. Raises
    `OSError` if the worker's descriptor cannot be opened."""
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
    """Grant the memory to every trainer that connects to the socket at `path` (mode 0600) while the
    context is open. Raises `SocketTaken` or `UnsafeSocketDirectory` if the path cannot be used."""
    make_private_directory(path.parent)
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen()
    listener.setblocking(False)
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


def _remove_stale(path: Path) -> None:
    """Remove the socket of a server that was killed. Raises `SocketTaken` if a running server
    listens there, or the path is not a socket."""
    if not path.exists():
        return
    if not path.is_socket():
        raise SocketTaken(f"--weights-socket: {path} is not a socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise SocketTaken(f"--weights-socket: another server listens on {path}; choose another")


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
        except OSError as error:  # no free descriptor; closing connections free some
            log.warning("weight_socket.accept_failed", reason=str(error))
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
        session = await bridge.open_session(lambda: _hang_up(connection))
        grant, fd = await weights.grant(session)
        await asyncio.to_thread(send_grant, connection, grant, fd)
        connection.setblocking(False)
        while await asyncio.get_running_loop().sock_recv(connection, 1):
            pass  # a trainer sends nothing over this socket; only its end is of interest
    except (BridgeConflict, NotExported) as error:
        await asyncio.to_thread(send_refusal, connection, str(error))
    except EngineTimeout as error:
        log.error("engine.unresponsive", reason=str(error))
    except OSError as error:
        log.warning("trainer.connection_lost", session=session, reason=str(error))
    finally:
        connection.close()
        if session is not None:
            await bridge.close_session(session)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end has just closed
        connection.shutdown(socket.SHUT_RDWR)


def make_private_directory(directory: Path) -> None:
    """Create the directory if it is missing. Raises `UnsafeSocketDirectory`."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    mode, own = stat.S_IMODE(found.st_mode), os.getuid()
    if found.st_uid != own or mode & 0o077:
        raise UnsafeSocketDirectory(
            f"--weights-socket: {directory} belongs to user {found.st_uid} with mode "
            f"{mode:04o}, but must belong to user {own} with mode 700; choose a directory that "
            f"does not exist yet, or run chown {own} and chmod 700 on this directory"
        )


@contextlib.contextmanager
def bridge_config_written(config: BridgeConfig, path: Path, required: bool) -> Iterator[None]:
    """The file exists while the context is open, unless another server replaces it. Raises
    `BridgeConfigUnwritable` if the file is required and cannot be written."""
    with contextlib.suppress(BridgeConfigUnreadable):
        other = read_bridge_config(path)
        log.warning(
            "bridge_config.replaced",
            reason="another server, or a server that was killed, had written a file at this path",
            path=str(path.absolute()),
            model=other.model,
            generation=other.generation,
            weights_socket=str(other.weights_socket),
        )
    try:
        write_bridge_config(config, path)
    except BridgeConfigUnwritable as error:
        if required:
            raise
        # Trainers query the server first, so most of them do not need the file.
        log.warning("bridge_config.not_written", reason=str(error))
        yield
        return
    log.info("bridge_config.written", path=str(path.absolute()))
    try:
        yield
    finally:
        with contextlib.suppress(BridgeConfigUnreadable):
            if read_bridge_config(path).generation == config.generation:
                path.unlink(missing_ok=True)
