"""Finds the inference server's weight memory and maps it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import structlog

from grpo_core.clients.inference import BridgeClient, BridgeInfo
from grpo_core.process.closing import ClosesOnExit
from grpo_core.weights.bridge_config import find_bridge_config
from grpo_core.weights.socket import WeightConnection, connect_weights
from grpo_trainer.errors import PolicyMismatch
from grpo_trainer.weight_sync.shared_memory.mapped_memory import map_memory
from grpo_trainer.weight_sync.shared_memory.views import MappedWeights

log = structlog.get_logger()


@dataclass(frozen=True)
class WeightPlaces:
    """What the user says about where the server's weights are; None: find out."""

    socket: Path | None = None
    config: Path | None = None
    """A vllm_bridge_config.json, which names the socket."""


@dataclass(frozen=True)
class Attachment(ClosesOnExit):
    """One trainer's hold on one server start. The session lasts as long as the connection."""

    connection: WeightConnection
    weights: MappedWeights
    info: BridgeInfo
    """As it was once attached: nobody else has written since."""

    @property
    def session(self) -> str:
        return self.connection.grant.session

    def is_lost(self) -> bool:
        return self.connection.server_has_closed()

    def close(self) -> None:
        self.connection.close()


def attach(
    bridge: BridgeClient, places: WeightPlaces, deadline_s: float | None = None
) -> Attachment:
    """Connect to the server's weight socket and map what it hands out.

    Args:
        deadline_s: how long the server may be unreachable; None: the client's own deadline.

    Raises:
        ServiceUnavailable: no server, no weight socket, or another trainer is attached.
        PolicyMismatch: the server shares nothing.
        UnreachableWeights: they are on a GPU that this process cannot share.
        BridgeConfigNotFound: nobody says where the socket is on this file system.
    """
    info = bridge.info(deadline_s)
    connection = connect_weights(_socket(bridge.base_url, info, places))
    try:
        weights = MappedWeights(connection.grant.manifest, map_memory(connection))
        # Asked again at the door: the trainer before may have been cut off in the meantime.
        return Attachment(connection, weights, bridge.info(deadline_s))
    except BaseException:
        connection.close()
        raise


def _socket(server_url: str, info: BridgeInfo, places: WeightPlaces) -> Path:
    """What the user names, else what the server names, else what a bridge configuration says:
    the server may see the directory of the socket under another path than we do."""
    if places.socket is not None:
        return places.socket
    if info.weights_socket is None:
        raise PolicyMismatch(
            f"the server at {server_url} shares no weights; start vllm-api-server with "
            "--share-weights"
        )
    if places.config is None and Path(info.weights_socket).exists():
        return Path(info.weights_socket)
    config = find_bridge_config(places.config, os.environ, info.generation)
    return Path(config.weights_socket)
