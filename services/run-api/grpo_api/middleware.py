"""Middleware around the application: request ids, logging, metrics and compression."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Iterable
from time import monotonic
from typing import Any

import structlog
from isal import isal_zlib
from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grpo_api.errors import (
    CLIENT_CLOSED_REQUEST,
    FAILURE,
    REQUEST_ID_HEADER,
    ShuttingDown,
    answer_to,
)
from grpo_api.metrics import Metrics
from grpo_api.store.payloads import GZIP_LEVEL, GZIP_WINDOW_BITS
from grpo_api.waiting import was_held
from grpo_core.security import listed

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
_HEADER = REQUEST_ID_HEADER.encode()
_CLOSE = (b"connection", b"close")
_SLOW_S = 1.0
_MAX_PATH_CHARS = 200
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER_METHOD = "other"
"""Metric label of unusual methods: labels must come from a bounded set."""
log = structlog.get_logger()


class RequestMiddleware:
    """The outermost layer: gives each request an id, logs it and counts it.

    The id is the caller's `X-Request-Id` if that is 1 to 128 visible ASCII characters, else a new
    one. During shutdown answers carry `Connection: close`, so that clients do not send their next
    request down a connection that is about to close.
    """

    def __init__(
        self, app: ASGIApp, closing: asyncio.Event, metrics: Metrics, routes: Iterable[BaseRoute]
    ) -> None:
        self._app = app
        self._closing = closing
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = (
            v.decode() for n, v in scope["headers"] if n == _HEADER and _REQUEST_ID.fullmatch(v)
        )
        request_id = next(sent, None) or uuid.uuid4().hex
        # Never unbound: uvicorn logs about this request after this layer has returned. The next
        # request of the connection binds its own id.
        structlog.contextvars.bind_contextvars(request_id=request_id)
        was_held.set(False)
        started = monotonic()
        status, body_bytes = CLIENT_CLOSED_REQUEST, 0

        async def counted() -> Message:
            nonlocal body_bytes
            message = await receive()
            body_bytes += len(message.get("body", b""))
            return message

        async def stamped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                close = [_CLOSE] if self._closing.is_set() else []
                named = (_HEADER, request_id.encode())
                message["headers"] = [*message.get("headers", ()), named, *close]
            await send(message)

        try:
            await self._app(scope, counted, stamped)
        except asyncio.CancelledError:
            # uvicorn's grace period for requests in flight has passed; no code awaits this task.
            if status != CLIENT_CLOSED_REQUEST:
                status = 500
                raise
            await answer_to(ShuttingDown())(scope, counted, stamped)
        except BaseException:
            status = 500
            raise
        finally:
            seconds = monotonic() - started
            _log_request(scope, status, seconds)
            self._metrics.observe(
                scope["method"] if scope["method"] in _METHODS else _OTHER_METHOD,
                template_of(scope["path"], self._routes),
                status,
                seconds,
                body_bytes,
            )


def _log_request(scope: Scope, status: int, seconds: float) -> None:
    # The raw path cannot hold control characters, which could change the terminal.
    path = scope["raw_path"][:_MAX_PATH_CHARS].decode("ascii", "backslashreplace")
    fields = {
        "method": scope["method"],
        "path": path,
        "status": status,
        "seconds": round(seconds, 4),
    }
    if status >= 500:
        reason = {"reason": scope[FAILURE]} if FAILURE in scope else {}
        log.warning("request.failed", **fields, **reason)
    elif seconds > _SLOW_S and not was_held.get():
        log.warning("request.slow", **fields)
    else:
        log.debug("request.answered", **fields)


UNMATCHED = "unmatched"
"""Metric label of every path without a route."""


def template_of(path: str, routes: Iterable[BaseRoute]) -> str:
    """`/batch/{batch_id}/ack` for `/batch/7/ack`, also for requests rejected before routing."""
    for route in routes:
        if isinstance(route, Route) and route.path_regex.match(path):
            return route.path
    return UNMATCHED


_OVER_BYTES = 1000
_GZIP = re.compile(r"(?:x-)?gzip(?!\s*;\s*q\s*=\s*0(?:\.0*)?$)(?:\s*;.*)?", re.IGNORECASE)
"""One coding of `Accept-Encoding`; the weight 0 refuses it (RFC 9110, 12.5.3)."""


class CompressionMiddleware:
    """Compresses long answers to GET requests while they are sent; other answers are short.

    With Starlette's `GZipMiddleware`, which uses zlib instead of ISA-L, a batch costs twice as much
    CPU time.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        accepted = listed(",".join(Headers(scope=scope).getlist("accept-encoding")))
        is_accepted = any(map(_GZIP.fullmatch, accepted))
        start: Message | None = None
        compressor: Any = None

        async def compressed(message: Message) -> None:
            """The answer's start waits for its first bytes, which say whether it is long."""
            nonlocal start, compressor
            if message["type"] == "http.response.start":
                start = message
                return
            body, more = message.get("body", b""), message.get("more_body", False)
            if start is not None:
                if more or len(body) >= _OVER_BYTES:
                    headers = MutableHeaders(scope=start)
                    headers.add_vary_header("Accept-Encoding")
                    if is_accepted:
                        headers["content-encoding"] = "gzip"
                        del headers["content-length"]
                        compressor = isal_zlib.compressobj(
                            GZIP_LEVEL, isal_zlib.DEFLATED, GZIP_WINDOW_BITS
                        )
                await send(start)
                start = None
            if compressor is not None:
                body = compressor.compress(body) + (b"" if more else compressor.flush())
            await send({"type": "http.response.body", "body": body, "more_body": more})

        await self._app(scope, receive, compressed)
