"""Attaches to the server's weight memory, and attaches again after the server restarted."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from grpo_core.clients.inference import BridgeClient, BridgeInfo
from grpo_core.deadline import Deadline
from grpo_core.errors import ServiceUnavailable
from grpo_core.tree.trainer import AUTO_DEVICE
from grpo_core.weights.bridge_config import find_bridge_config
from grpo_core.weights.socket import WeightConnection, connect_weights
from grpo_trainer.errors import LostServer, PolicyMismatch, WeightSyncError
from grpo_trainer.model.loading import require_device
from grpo_trainer.weight_sync.shared_memory import MappedWeights, map_weights

log = structlog.get_logger()

RETURN_POLL_S = 0.5
_RETURN_ATTEMPT_S = 5.0


@dataclass(frozen=True)
class Attachment:
    """The connection of one trainer to one server process. The session ends with the connection."""

    connection: WeightConnection
    weights: MappedWeights
    info: BridgeInfo
    """Read after attaching, so no other trainer has written since."""

    @property
    def session(self) -> str:
        return self.connection.grant.session


@dataclass(eq=False)
class ServerConnection:
    """Holds at most one attachment.

    Args:
        bridge: control client of the server
        socket: the server's weight socket; None: find it automatically
        bridge_config: a vllm_bridge_config.json, which names the socket
        dtype: the data type that the server must have; "auto" accepts any
        device: the device that the server's weights must be on; "auto" accepts any
        return_deadline_s: how long the trainer waits for a stopped server to return
    """

    bridge: BridgeClient
    socket: Path | None = None
    bridge_config: Path | None = None
    dtype: str = "auto"
    device: str = AUTO_DEVICE
    return_deadline_s: float = 300.0
    _attachment: Attachment | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.bridge.give_up_if(self.is_lost)

    def is_lost(self) -> bool:
        """Whether the server that owns the mapped memory has ended."""
        mapped = self._attachment
        return mapped is not None and mapped.connection.server_has_closed()

    @property
    def attachment(self) -> Attachment:
        if self._attachment is None:
            raise WeightSyncError("the trainer is not attached; call load_policy() first")
        return self._attachment

    def attach(self, deadline_s: float | None = None) -> Attachment:
        """Connect to the server's weight socket and map its memory.

        Args:
            deadline_s: how long the server may be unreachable; None: the client's own deadline

        Raises:
            ServiceUnavailable: no server, no weight socket, or another trainer is attached.
            PolicyMismatch: the server shares no weights, or has another data type or device.
            UnreachableWeights: the weights are on a GPU that this process cannot share.
            BridgeConfigNotFound: no setting or file names the socket on this file system.
        """
        info = self.bridge.info(deadline_s)
        connection = connect_weights(self._socket(info))
        try:
            weights = map_weights(connection)
            # Read again once attached: the previous trainer may have died while writing in the
            # meantime.
            attachment = Attachment(connection, weights, self.bridge.info(deadline_s))
        except BaseException:
            connection.close()
            raise
        self._attachment = attachment
        if self.dtype not in ("auto", weights.dtype_name):
            raise PolicyMismatch(
                f"--dtype {self.dtype}, but the server's weights are in {weights.dtype_name}; "
                "start trainer and server with the same --dtype, or the trainer with --dtype auto"
            )
        require_device(self.device, weights.device)
        return attachment

    def reattach(self, why: str) -> Attachment:
        """Wait for the return of a server that stopped, and attach to it.

        Raises:
            LostServer: it did not come back in time.
            PolicyMismatch: it came back with another data type.
        """
        log.warning(
            "server.connection_lost",
            reason=why,
            reconnect_deadline_s=self.return_deadline_s,
        )
        self.close()
        started, deadline = time.monotonic(), Deadline(self.return_deadline_s)
        while True:
            try:
                attachment = self.attach(_RETURN_ATTEMPT_S)
            except ServiceUnavailable as error:
                if deadline.has_passed:
                    raise self.did_not_return(str(error)) from error
                time.sleep(RETURN_POLL_S)
            else:
                log.info(
                    "trainer.reattached",
                    seconds=round(time.monotonic() - started, 1),
                    generation=attachment.weights.manifest.generation,
                )
                return attachment

    def close(self) -> None:
        """Disconnect. The server keeps serving the latest weights."""
        if self._attachment is not None:
            self._attachment.connection.close()
            self._attachment = None

    def did_not_return(self, what: str) -> LostServer:
        return LostServer(
            f"the inference server at {self.bridge.base_url} stopped and did not come back "
            f"within {self.return_deadline_s:g} s ({what}); read its log, then start both again"
        )

    def _socket(self, info: BridgeInfo) -> Path:
        """The user's socket, else the server's, else that of a bridge configuration. The server may
        mount the socket's directory under another path than this process."""
        if self.socket is not None:
            return self.socket
        if info.weights_socket is None:
            raise PolicyMismatch(
                f"{self.bridge.base_url} shares no weights; start the server with --share-weights"
            )
        if self.bridge_config is None and Path(info.weights_socket).exists():
            return Path(info.weights_socket)
        config = find_bridge_config(self.bridge_config, os.environ, info.generation)
        return Path(config.weights_socket)
