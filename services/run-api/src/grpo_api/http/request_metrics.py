"""Counts requests by route, and how long they took."""

from __future__ import annotations

from time import monotonic

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grpo_api.http.request_log import CLIENT_CLOSED_REQUEST
from grpo_api.http.route_templates import RouteTemplates
from grpo_api.observability.metrics import Metrics

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER_METHOD = "other"


class RequestMetricsMiddleware:
    """Labels come from bounded sets: templates for paths, `other` for unusual methods."""

    def __init__(self, app: ASGIApp, metrics: Metrics, templates: RouteTemplates) -> None:
        self._app = app
        self._metrics = metrics
        self._templates = templates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, body_bytes = CLIENT_CLOSED_REQUEST, 0

        async def counted() -> Message:
            nonlocal body_bytes
            message = await receive()
            body_bytes += len(message.get("body", b""))
            return message

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        started, failed = monotonic(), True
        try:
            await self._app(scope, counted, noted)
            failed = False
        finally:
            self._metrics.observe(
                scope["method"] if scope["method"] in _METHODS else _OTHER_METHOD,
                self._templates.template(scope["path"]),
                500 if failed else status,
                monotonic() - started,
                body_bytes,
            )
