"""`POST /generate`, and a health check that generates one token."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from grpo_vllm.generate.request import parse_generate_request
from grpo_vllm.generate.runner import Generation, GenerationFailed
from grpo_vllm.generate.streaming import JsonLines, json_lines
from grpo_vllm.http.in_flight import unless_disconnected
from grpo_vllm.routes.errors import BodyTooLarge, ErrorHandlingRoute
from grpo_vllm.weights.lora import AdapterSwitch
from grpo_vllm.weights.write_lease import WeightBridge

CLIENT_CLOSED_REQUEST = 499
MAX_BODY_BYTES = 16 * 1024 * 1024
HEALTH_DEADLINE_S = 5.0
ONE_TOKEN = b'{"prompt": {"prompt_token_ids": [0]}, "max_tokens": 1, "temperature": 0}'


def generation_router(
    engine: Any, bridge: WeightBridge, adapters: AdapterSwitch | None = None
) -> APIRouter:
    """`POST /generate` and `GET /health_generate`."""
    router = APIRouter(route_class=ErrorHandlingRoute)

    def start(body: bytes) -> Generation:
        request = parse_generate_request(body, engine.model_config, engine.get_tokenizer())
        adapter = adapters.current if adapters else None
        return Generation(engine, request, lambda: bridge.version, adapter)

    @router.post("/generate")
    async def post_generate(request: Request) -> Response:
        generation = start(await _body(request))
        if generation.request.stream:
            return await _stream(request, generation)
        answer = await unless_disconnected(
            request.receive, asyncio.create_task(_whole_answer(generation))
        )
        if answer is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return Response(
            orjson.dumps(answer, option=orjson.OPT_NON_STR_KEYS), media_type="application/json"
        )

    @router.get("/health_generate")
    async def get_health_generate() -> Response:
        try:
            async with asyncio.timeout(HEALTH_DEADLINE_S):
                await _whole_answer(start(ONE_TOKEN))
        except TimeoutError:
            raise GenerationFailed(
                f"the engine sampled no token within {HEALTH_DEADLINE_S:g} s; the server may be "
                "paused or overloaded"
            ) from None
        return Response()

    return router


async def _whole_answer(generation: Generation) -> dict[str, Any]:
    async with aclosing(generation.advance()) as progress:
        async for _ in progress:
            pass
    return generation.answer()


async def _stream(request: Request, generation: Generation) -> Response:
    lines = json_lines(generation)
    first = await unless_disconnected(request.receive, asyncio.create_task(anext(lines)))
    if first is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return JsonLines(first, lines)


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"body: larger than the limit of {MAX_BODY_BYTES} bytes")
    return bytes(body)
