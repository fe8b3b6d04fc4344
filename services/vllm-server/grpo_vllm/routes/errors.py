"""Answers errors of this project's routes with a status code and a JSON body."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from grpo_core.errors import GrpoError
from grpo_core.weights.directory_checks import UnusableWeights
from grpo_vllm.engine.control import EngineTimeout
from grpo_vllm.routes.generate_request import BadGenerateRequest
from grpo_vllm.routes.running_request import GenerationFailed
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
    NotOffered: 409,
    EngineTimeout: 503,
    GenerationFailed: 503,
}


_WHEN = {
    400: "The request is wrong, or its body cannot be read",
    401: "The API key is missing or wrong",
    403: "The request comes from a web page of another site",
    409: "The request conflicts with the state or the options of the server",
    413: "The body is too large",
    422: "The body or the directory that it names is invalid",
    503: "The engine did not do this in time, or is not serving. Repeat the request",
}
_ALWAYS = (401, 403)


class Refusal(BaseModel):
    """The answer to a request that is refused."""

    detail: str


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` entry of routes: their error statuses, for the OpenAPI document."""
    return {
        status: {"model": Refusal, "description": _WHEN[status]}
        for status in sorted({*_ALWAYS, *statuses})
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


def _answer(status: int, detail: str) -> Response:
    headers = {"retry-after": str(RETRY_AFTER_S)} if status == 503 else None
    # as ASCII, because the name of a field may be half of a character
    return Response(json.dumps({"detail": detail}), status, headers, "application/json")


def _mistake(type: str, loc: tuple[str | int, ...], input: Any, **_: Any) -> str:
    if type == "json_invalid":
        return "body: not valid JSON"
    field = ".".join(str(part) for part in loc[1:]) or "body"
    return f"{field}: {_KINDS.get(type) or f'invalid value {input!r:.80}'}"
