"""`POST /generate`, and a health check that generates one token.

With `"stream": true` the answer comes as JSON lines while tokens are sampled:

    {"text": ["2+2=4"]}                                           prompt and text so far
    {"text": ["2+2=4."], "finish_reasons": ["stop"], ...}         last line of a complete answer

An answer is complete only if its last line has `finish_reasons`. A failed answer ends with
`{"error": "..."}` and without the end mark of the chunked transfer, so that HTTP clients raise an
error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
import structlog
from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from grpo_core.errors import GrpoError
from grpo_vllm.middleware import unless_disconnected
from grpo_vllm.routes.errors import BodyTooLarge, ErrorHandlingRoute, refusals
from grpo_vllm.routes.generate_request import REQUEST_SCHEMA, parse_generate_request
from grpo_vllm.routes.running_request import GenerationFailed, RunningRequest
from grpo_vllm.weights.lora import AdapterSwitch
from grpo_vllm.weights.write_lease import WeightBridge

log = structlog.get_logger()

MEDIA_TYPE = "application/x-ndjson"
CLIENT_CLOSED_REQUEST = 499
MAX_BODY_BYTES = 16 * 1024 * 1024
HEALTH_DEADLINE_S = 5.0
REQUEST: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "prompt, stream, and sampling parameters of vLLM",
        "content": {"application/json": {"schema": REQUEST_SCHEMA}},
    }
}
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The completions; with `stream`, as lines of JSON",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            MEDIA_TYPE: {"schema": {"type": "string"}},
        },
    }
}
"""For the OpenAPI document: the handler reads the body itself, and writes the answer."""
ONE_TOKEN = b'{"prompt": {"prompt_token_ids": [0]}, "max_tokens": 1, "temperature": 0}'


def generation_router(
    engine: Any, bridge: WeightBridge, adapters: AdapterSwitch | None = None
) -> APIRouter:
    """`POST /generate` and `GET /health_generate`."""
    router = APIRouter(route_class=ErrorHandlingRoute, responses=refusals(503))

    def start(body: bytes) -> RunningRequest:
        request = parse_generate_request(body, engine.model_config, engine.get_tokenizer())
        adapter = adapters.current if adapters else None
        return RunningRequest(engine, request, lambda: bridge.version, adapter)

    @router.post("/generate", responses=ANSWERS | refusals(400, 413), openapi_extra=REQUEST)
    async def post_generate(request: Request) -> Response:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise BodyTooLarge(f"body: larger than the limit of {MAX_BODY_BYTES} bytes")
        generation = start(bytes(body))
        if generation.request.stream:
            lines = json_lines(generation)
            first = await unless_disconnected(request.receive, anext(lines))
            if first is not None:
                return JsonLines(first, lines)
        else:
            answer = await unless_disconnected(request.receive, _whole_answer(generation))
            if answer is not None:
                content = orjson.dumps(answer, option=orjson.OPT_NON_STR_KEYS)
                return Response(content, media_type="application/json")
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @router.get("/health_generate", response_class=Response)
    async def get_health_generate() -> Response:
        try:
            async with asyncio.timeout(HEALTH_DEADLINE_S):
                await _whole_answer(start(ONE_TOKEN))
        except TimeoutError:
            raise GenerationFailed(
                f"no token within {HEALTH_DEADLINE_S:g} s; the server may be paused or overloaded"
            ) from None
        return Response()

    return router


async def _whole_answer(generation: RunningRequest) -> dict[str, Any]:
    async with aclosing(generation.advance()) as progress:
        async for _ in progress:
            pass
    return generation.answer()


async def json_lines(generation: RunningRequest) -> AsyncGenerator[bytes, None]:
    """One line for each output of the engine, each with the whole text of every completion."""
    prompt = generation.prompt_text
    async with aclosing(generation.advance()) as progress:
        async for _ in progress:
            if not all(c.finish_reason for c in generation.completions):
                yield _line({"text": [prompt + c.text for c in generation.completions]})
    answer = generation.answer()
    yield _line({**answer, "text": [prompt + text for text in answer["text"]]})


class JsonLines(Response):
    """Args:
    first: the first line. It is produced before the response starts, so that an early failure
        still gets an error status.
    rest: the lines after it
    """

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type=MEDIA_TYPE)
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        async with aclosing(self._rest):
            start = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **start})
            await unless_disconnected(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        await _send(send, self._first)
        try:
            async for line in self._rest:
                await _send(send, line)
        except GrpoError as error:
            log.warning(
                "streamed_response.failed",
                reason=str(error),
                effect="the client received only a part of the response, and this error",
            )
            await _send(send, _line({"error": str(error)}))
            return  # without the end mark: the server then closes the connection
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Send, line: bytes) -> None:
    await send({"type": "http.response.body", "body": line, "more_body": True})


def _line(content: dict[str, Any]) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE)
