"""ASGI middleware: holds requests while the weights are wrong, and counts requests in flight.

After a restart the engine may hold other weights than the run's. Until a trainer writes the right
ones back, health checks fail, and requests that generate are held for a while and then refused
(`ReadinessGate`). All other requests pass. Weights may also be too old (`FollowGate`).

Each request belongs to the *cohort* that was current when it arrived (`InFlight`). An adapter is
unloaded only when no request of its cohort is left. A drain that exceeds its deadline ends the
remaining requests with status 503.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grpo_core.deadline import Deadline
from grpo_core.security import refuse
from grpo_core.weights.servers import ABSENT_AFTER_S

T = TypeVar("T")

HEALTH_PATHS = frozenset({"/health", "/health_generate", "/ping"})
OPEN_PATHS = frozenset(
    {
        *("/tokenize", "/detokenize", "/v1/messages/count_tokens"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    }
)
OPEN_PREFIXES = ("/bridge/", "/lora/", "/engine/")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
RETRY_LATER = {b"retry-after": b"2"}
"""Header of refusals, in seconds."""
TRY_AGAIN_LATER = 1013
"""WebSocket close code "Try Again Later" (IANA registry)."""
LOOKAHEAD_BYTES = 64 * 1024
"""The server reads at most this much of a held request's body, to detect a disconnection."""
POLL_S = 0.05
SILENT = "the supervisor of this engine has yet to say whether its weights are the newest"
GIVEN_UP = (
    "the engine could not finish this request in time, because it restarts or does not hold the "
    "weights of the run; send the request again"
)


@dataclass(frozen=True)
class GateRefusal:
    """Why the server generates nothing now. `hold`: this may end soon, so requests should wait."""

    reason: str
    hold: bool


class FollowGate:
    """Closes the engine while its weights may be too old: it samples only while the supervisor says
    so, which repeats it every second. If it was stopped, the engine holds requests until it has
    looked for newer weights. While Redis does not answer, nobody knows of newer ones and the engine
    samples; when Redis is back after a while, the engine holds requests likewise.

    Args: follows: False for servers that follow no trainer; their gate stays open
    """

    def __init__(self, follows: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._follows = follows
        self._clock = clock
        self._heard_at = float("-inf")
        self._behind, self._hold = "", True
        self.head = self.staged = ""

    def note(self, behind: str, hold: bool, head: str, staged: str) -> None:
        """The supervisor's word. `behind`: why nothing may be sampled; "" if it may; `hold`: this
        may end soon. `head`, `staged`: ids of the newest announced version and of the newest one on
        this host."""
        self._heard_at = self._clock()
        self._behind, self._hold, self.head, self.staged = behind, hold, head, staged

    def refusal(self) -> GateRefusal | None:
        """The reason why requests may not pass now; None if they may."""
        if not self._follows:
            return None
        if self._clock() - self._heard_at > ABSENT_AFTER_S:
            return GateRefusal(SILENT, hold=True)
        return GateRefusal(self._behind, self._hold) if self._behind else None

    async def wait(self, at_most_s: float) -> None:
        """Return soon, when the refusal may have changed."""
        await asyncio.sleep(min(at_most_s, POLL_S))


@dataclass
class ReadinessGate:
    """ASGI middleware.

    Args:
        app: the application that answers requests that pass
        refusal: returns None if requests may pass
        wait: returns when `refusal` may have changed, or after the given number of seconds
        hold_s: the longest time that one request is held
    """

    app: ASGIApp
    refusal: Callable[[], GateRefusal | None]
    wait: Callable[[float], Awaitable[None]]
    hold_s: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self.refusal() if scope["type"] in ("http", "websocket") else None
        if refusal is None or samples_nothing(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": TRY_AGAIN_LATER})
        elif scope["path"] in HEALTH_PATHS or not refusal.hold:
            await refuse(send, 503, refusal.reason, RETRY_LATER)
        else:
            await self._hold(scope, _Lookahead(receive), send)

    async def _hold(self, scope: Scope, incoming: _Lookahead, send: Send) -> None:
        if not await unless_disconnected(incoming.look, self._hold_ends()):
            return
        refusal = self.refusal()
        if refusal is None:
            await self.app(scope, incoming.receive, send)
        else:
            await refuse(send, 503, refusal.reason, RETRY_LATER)

    async def _hold_ends(self) -> bool:
        """Returns True as soon as requests may pass, or when the hold is over."""
        hold = Deadline(self.hold_s, asyncio.get_running_loop().time)
        while True:
            refusal = self.refusal()
            left_s = hold.left_s
            if refusal is None or not refusal.hold or not left_s:
                return True
            await self.wait(left_s)


class _Lookahead:
    """Reads messages while the request is held, and replays them in order afterwards."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._taken: deque[Message] = deque()

    async def look(self) -> Message:
        self._taken.append(await self._receive())
        return self._taken[-1]

    async def receive(self) -> Message:
        return self._taken.popleft() if self._taken else await self._receive()


def samples_nothing(scope: Scope) -> bool:
    """False for unknown paths, which count as generation, and for health checks."""
    if scope["type"] == "websocket" or scope["path"] in HEALTH_PATHS:
        return False
    path = scope["path"]
    return scope["method"] in SAFE_METHODS or path in OPEN_PATHS or path.startswith(OPEN_PREFIXES)


@dataclass(eq=False)
class _Request:
    cohort: int
    task: asyncio.Task[None]
    given_up: bool = False


@dataclass
class InFlight:
    """`on_dropped`: called for each request that a drain ends early."""

    cohort: int = 0
    on_dropped: Callable[[], None] = field(default=lambda: None)
    _requests: set[_Request] = field(default_factory=set)
    _fewer: asyncio.Event = field(default_factory=asyncio.Event)

    def __len__(self) -> int:
        return len(self._requests)

    def next_cohort(self) -> int:
        """Start a new cohort for requests that arrive from now on; returns its number."""
        self.cohort += 1
        return self.cohort

    async def finished_up_to(self, cohort: int) -> None:
        """Return when no request of this cohort or an earlier one is left."""
        while any(request.cohort <= cohort for request in self._requests):
            self._fewer.clear()
            await self._fewer.wait()

    def give_up_all(self) -> None:
        """End every request: with status 503, or by closing the connection if its answer began."""
        for request in self._requests:
            request.given_up = True
            request.task.cancel()
            self.on_dropped()

    async def pass_on(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Let `app` answer the request. Count the request if it samples tokens."""
        if scope["type"] != "http" or samples_nothing(scope):
            await app(scope, receive, send)
            return
        begun = False

        async def note_and_send(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        # A separate task, because cancelling it must not cancel the server's task.
        task = asyncio.ensure_future(app(scope, receive, note_and_send))
        request = _Request(self.cohort, task)
        self._requests.add(request)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._requests.discard(request)
            self._fewer.set()
        if request.given_up and not begun:
            await refuse(send, 503, GIVEN_UP, RETRY_LATER | {b"connection": b"close"})
        elif not task.cancelled():
            task.result()


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`. If the client disconnects first, cancel `work` and return None. Nothing
    is read after the return."""
    working, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    """Returns when the client disconnects. Never returns if its body is too large to read."""
    taken_bytes = 0
    while taken_bytes <= LOOKAHEAD_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        taken_bytes += len(message.get("body", b""))
    await asyncio.Event().wait()
