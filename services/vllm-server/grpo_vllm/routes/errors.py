"""Answers errors of this project's routes with a status code and a JSON body."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

from grpo_core.errors import GrpoError
from grpo_core.weights.directory_checks import UnusableWeights
from grpo_vllm.engine.control import EngineTimeout
from grpo_vllm.generate.request import BadGenerateRequest
from grpo_vllm.generate.runner import GenerationFailed
from grpo_vllm.weights.lora import AdapterRefused
from grpo_vllm.weights.write_lease import BridgeConflict

RETRY_AFTER_S = 1
_KINDS = {"missing": "missing", "extra_forbidden": "unknown field"}


class BodyTooLarge(GrpoError):
    """The request's body is larger than the limit."""


class NotOffered(GrpoError):
    """The server cannot do this with its options or on this platform."""


STATUS: dict[type[GrpoError], int] = {
    BadGenerateRequest: 400,
    AdapterRefused: 409,
    BridgeConflict: 409,
    BodyTooLarge: 413,
    UnusableWeights: 422,
    NotOffered: 501,
    EngineTimeout: 503,
    GenerationFailed: 503,
}


class ErrorHandlingRoute(APIRoute):
    """Answers our own errors. vLLM's error handlers would answer differently in each version."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except tuple(STATUS) as error:
                status = next(s for kind, s in STATUS.items() if isinstance(error, kind))
                return _answer(status, str(error))
            except RequestValidationError as error:
                mistakes = "; ".join(_mistake(**problem) for problem in error.errors())
                return _answer(422, f"{mistakes}; expected {self.summary}")

        return answer


def _answer(status: int, detail: str) -> JSONResponse:
    headers = {"retry-after": str(RETRY_AFTER_S)} if status == 503 else None
    return JSONResponse({"detail": detail}, status, headers)


def _mistake(type: str, loc: tuple[str | int, ...], input: Any, **_: Any) -> str:
    if type == "json_invalid":
        return "body: not valid JSON"
    field = ".".join(str(part) for part in loc[1:]) or "body"
    return f"{field}: {_KINDS.get(type) or f'invalid value {input!r:.80}'}"
