"""Prepared answers of `/generate`."""

from __future__ import annotations

from typing import Any

from tests.support.http_stub import Route

PROMPT = [5, 6, 7]


def generate_answer(texts: list[str], **changes: Any) -> dict[str, Any]:
    """One completion per text, with two tokens: 90 + i with logprob -0.5, then 91 with -1.25."""
    token_ids = [[90 + index, 91] for index in range(len(texts))]
    answer = {
        "text": texts,
        "prompt": "irrelevant",
        "finish_reasons": ["stop"] * len(texts),
        "logprobs": [[[{str(first): -0.5}], [{str(second): -1.25}]] for first, second in token_ids],
        "prompt_token_ids": PROMPT,
        "token_ids": token_ids,
        "policy_version": [[[1, index], [1, index + 1]] for index in range(len(texts))],
    }
    return answer | changes


def inference_routes(generate: Route) -> dict[str, Route]:
    """The routes of a healthy vllm-api-server without shared weights."""
    return {
        "GET /health": lambda _body: (200, {}),
        "GET /bridge/info": lambda _body: (404, {}),
        "POST /generate": generate,
    }
