"""Holds or refuses requests that generate while the server has the wrong weights.

After a restart the engine may hold other weights than the run's. Until a trainer writes the right
ones back, health checks fail, and requests that generate are held for a while and then refused. All
other requests pass.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grpo_core.deadline import Deadline
from grpo_core.wire.policy_version import PolicyVersion

HEALTH_PATHS = frozenset({"/health", "/health_generate", "/ping"})
OPEN_PATHS = frozenset(
    {
        *("/tokenize", "/detokenize", "/v1/messages/count_tokens"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    }
)
OPEN_PREFIXES = ("/bridge/", "/lora/", "/engine/")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
RETRY_AFTER_S = 2
TRY_AGAIN_LATER = 1013
"""WebSocket close code "Try Again Later" (IANA registry)."""
LOOKAHEAD_BYTES = 64 * 1024
"""The server reads at most this much of a held request's body, to detect a disconnection."""


@dataclass(frozen=True)
class GateRefusal:
    """Why the server generates nothing now. `hold`: this may end soon, so requests should wait."""

    reason: str
    hold: bool


class ReadinessGate:
    """ASGI middleware.

    Args:
        app: the application that answers requests that pass
        refusal: returns None if requests may pass
        wait: returns when `refusal` may have changed, or after the given number of seconds
        hold_s: the longest time that one request is held
    """

    def __init__(
        self,
        app: ASGIApp,
        refusal: Callable[[], GateRefusal | None],
        wait: Callable[[float], Awaitable[None]],
        hold_s: float,
    ) -> None:
        self._app = app
        self._refusal = refusal
        self._wait = wait
        self._hold_s = hold_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal() if scope["type"] in ("http", "websocket") else None
        if refusal is None or samples_nothing(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": TRY_AGAIN_LATER})
        elif scope["path"] in HEALTH_PATHS or not refusal.hold:
            await refuse(refusal.reason, scope, receive, send)
        else:
            await self._hold(scope, _Lookahead(receive), send)

    async def _hold(self, scope: Scope, incoming: _Lookahead, send: Send) -> None:
        opening = asyncio.create_task(self._wait_for_opening())
        leaving = asyncio.create_task(incoming.until_disconnect())
        try:
            await asyncio.wait([opening, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                return
            refusal = opening.result()
        finally:
            opening.cancel()
            leaving.cancel()
            # Both tasks must have stopped reading before the request passes.
            await asyncio.gather(opening, leaving, return_exceptions=True)
        if refusal is None:
            await self._app(scope, incoming.receive, send)
        else:
            await refuse(refusal.reason, scope, incoming.receive, send)

    async def _wait_for_opening(self) -> GateRefusal | None:
        """Returns None as soon as requests may pass, or the refusal when the hold is over."""
        hold = Deadline(self._hold_s, asyncio.get_running_loop().time)
        while True:
            refusal = self._refusal()
            left_s = hold.left_s
            if refusal is None or not refusal.hold or not left_s:
                return refusal
            await self._wait(left_s)


class _Lookahead:
    """Reads messages while the request is held, and replays them in order afterwards."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._taken: deque[Message] = deque()

    async def until_disconnect(self) -> None:
        """Returns when the client disconnects. Never returns if its body is too large to read."""
        taken_bytes = 0
        while taken_bytes <= LOOKAHEAD_BYTES:
            message = await self._receive()
            self._taken.append(message)
            if message["type"] == "http.disconnect":
                return
            taken_bytes += len(message.get("body", b""))
        await asyncio.Event().wait()

    async def receive(self) -> Message:
        return self._taken.popleft() if self._taken else await self._receive()


def samples_nothing(scope: Scope) -> bool:
    """False for unknown paths, which count as generation, and for health checks."""
    if scope["type"] == "websocket" or scope["path"] in HEALTH_PATHS:
        return False
    path = scope["path"]
    return scope["method"] in SAFE_METHODS or path in OPEN_PATHS or path.startswith(OPEN_PREFIXES)


async def refuse(reason: str, scope: Scope, receive: Receive, send: Send, **headers: str) -> None:
    headers |= {"retry-after": str(RETRY_AFTER_S)}
    await JSONResponse({"detail": reason}, 503, headers=headers)(scope, receive, send)


class ServingState(StrEnum):
    """`state` of `GET /bridge/info`."""

    SERVING = "serving"
    PAUSED = "paused"
    """A trainer writes weights. Requests in flight wait until its lease ends."""
    AWAITING_WEIGHTS = "awaiting_weights"
    """The engine restarted during a run and does not hold the run's weights yet."""
    FAILED = "failed"
    """No trainer wrote the run's weights back before the deadline. One may still do so."""
    SLEEPING = "sleeping"


_CLOSED_BECAUSE = {
    ServingState.AWAITING_WEIGHTS: "the engine restarted and holds the weights of --model; "
    "waiting for a trainer to write policy version {version} back",
    ServingState.FAILED: "the engine restarted, and no trainer wrote policy version {version} back "
    "in time. Start the trainer again; or restart this server with --no-await-weights or another "
    "--run-id to serve --model",
    ServingState.SLEEPING: "the engine is sleeping; end the sleep with POST /bridge/wake_up",
}


def refusal_in(state: ServingState, version: PolicyVersion) -> GateRefusal | None:
    """Why the server may generate nothing in this state. None in a pause, which ends soon."""
    reason = _CLOSED_BECAUSE.get(state)
    if reason is None:
        return None
    hold = state is ServingState.AWAITING_WEIGHTS
    return GateRefusal(reason.format(version=list(version)), hold)
