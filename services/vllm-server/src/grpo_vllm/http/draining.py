"""The orderly end of an engine process that another one is about to follow."""

from __future__ import annotations

import asyncio

import structlog

from grpo_vllm.forkserver.protocol import EngineEnd
from grpo_vllm.http.connection_handover import ParkingLot
from grpo_vllm.http.in_flight import InFlight
from grpo_vllm.http.server import HttpServer

log = structlog.get_logger()


class Drain:
    """Nothing new is taken in, and no connection is closed under a client's hands: see
    `grpo_vllm.http.connection_handover`."""

    def __init__(
        self, server: HttpServer, lot: ParkingLot, in_flight: InFlight, channel: EngineEnd
    ) -> None:
        self._server = server
        self._lot = lot
        self._in_flight = in_flight
        self._channel = channel

    def begin(self, within_s: float) -> None:
        """Answer what is under way, for `within_s` seconds; then give the rest up, and end."""
        if self._lot.is_open:
            return
        log.info("draining", in_flight=len(self._in_flight), within_s=within_s)
        self._server.drain(self._lot, self._channel.park, within_s)
        asyncio.get_running_loop().call_later(within_s, self._in_flight.give_up_all)
