"""The supervisor's own HTTP answers: its health port, and status 503 after the final failure."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from grpo_core.weights.supervisor_protocol import SupervisorPhase, SupervisorStatus
from grpo_vllm.http.server import require_api_key

RETRY_AFTER_S = 10
HEALTH_PATHS = ("/healthz", "/readyz", "/status")


def health_app(
    status: Callable[[], SupervisorStatus], ready: Callable[[], bool], api_key: SecretStr | None
) -> ASGIApp:
    """`/healthz`: 200 unless the supervisor has given up. `/readyz`: 200 if requests are answered
    now. `/status`: the whole status; needs the API key."""

    async def healthz(_request: Request) -> Response:
        now = status()
        return _answer(now, now.state is not SupervisorPhase.FAILED)

    async def readyz(_request: Request) -> Response:
        return _answer(status(), ready())

    async def everything(_request: Request) -> Response:
        return JSONResponse(status().model_dump(mode="json"))

    handlers = dict(zip(HEALTH_PATHS, (healthz, readyz, everything), strict=True))
    app = Starlette(routes=[Route(path, handler) for path, handler in handlers.items()])
    return require_api_key(app, api_key)


def _answer(status: SupervisorStatus, good: bool) -> Response:
    body = {"state": status.state.value, "reason": status.reason}
    return JSONResponse(body, 200 if good else 503)


def given_up(reason: str) -> ASGIApp:
    """Answers every request with status 503 and the reason."""
    headers = {"retry-after": str(RETRY_AFTER_S), "connection": "close"}
    response = JSONResponse({"detail": reason}, 503, headers=headers)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await response(scope, receive, send)

    return answer
