"""`POST /generate` refuses each kind of mistake with status 4xx and its name, and continues to
serve."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.fixtures.inference import InferenceServer

VALID: dict[str, Any] = {"prompt": {"prompt_token_ids": [5, 6]}, "max_tokens": 4, "logprobs": 0}
CHAT = [{"role": "user", "content": "1+1="}]


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "prompt": [
        ({"prompt": ""}, "prompt: expected at least one token"),
        ({"prompt": {"prompt_token_ids": [1], "multi_modal_data": {}}}, "prompt: expected"),
        ({"prompt": {"prompt_token_ids": [1, 99999]}}, "prompt_token_ids[1]"),
        ({"prompt": {"prompt_token_ids": [1] * 600}}, "600 tokens"),
        ({"prompt": "x" * 100_000}, "prompt: 100000 characters"),
    ],
    "several mistakes, all of them named": [
        ({"n": 0, "best_of": 3, "watermarking": True}, "n: expected"),
        ({"n": 0, "best_of": 3, "watermarking": True}, "unknown parameters: best_of"),
        ({"n": 0, "best_of": 3, "watermarking": True}, "watermarking: the server does not support"),
    ],
    "only the server sets it": [
        ({"output_kind": 2}, "output_kind: the server sets this parameter"),
    ],
    "wrong type": [
        ({"temperature": "hot"}, "temperature"),
        ({"stream": "yes"}, "stream: expected true or false"),
    ],
    "outside vLLM's range": [
        ({"top_p": 7}, "top_p"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"n": 2, "temperature": 0}, "n"),
    ],
    "outside our range, where logits would overflow": [
        ({"logit_bias": {"5": 1e39}}, "logit_bias: expected values from"),
        ({"repetition_penalty": 1e-30}, "repetition_penalty: expected 0.01"),
    ],
    "would end the engine, or spoil the answers of others": [
        ({"seed": 1}, "seed: not supported per request on CPU"),
        ({"logprob_token_ids": [1], "logprobs": 1}, "logprob_token_ids"),
        ({"prompt_logprobs": 0, "skip_reading_prefix_cache": False}, "skip_reading_prefix_cache"),
        ({"stop": ["\ud800"]}, "surrogate"),
    ],
    "inside a nested value": [
        ({"repetition_detection": {"pattern": 1}}, "repetition_detection: unknown fields pattern"),
        ({"extra_args": {"deep": nested(100)}}, "extra_args: nested deeper"),
        ({"structured_outputs": {"choice": ["x" * 1000] * 17}}, "structured_outputs: 17"),
    ],
    "a grammar that cannot be followed": [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ],
    "no token is left to sample": [
        ({"allowed_token_ids": [65], "bad_words": ["b"]}, "leave no token"),
        (
            {"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [5]},
            "allowed_token_ids, structured_outputs: these constraints leave no token",
        ),
    ],
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_is_named(shared_server: InferenceServer, mistake: str) -> None:
    for body, says in REFUSED[mistake]:
        content = json.dumps(VALID | body)
        answer = httpx.post(f"{shared_server.url}/generate", content=content)
        assert answer.status_code == 400, body
        assert says in answer.json()["detail"], body
    assert httpx.post(f"{shared_server.url}/generate", json=VALID).status_code == 200


def test_bodies_that_are_no_json_object_or_too_large_are_refused(
    shared_server: InferenceServer,
) -> None:
    bodies = (b"{", b"[]", b"\xff", b'{"prompt": NaN}', b"[" * 100_000, b" " * 17 * 2**20)
    for content, status in zip(bodies, [*[400] * 5, 413], strict=True):
        answer = httpx.post(f"{shared_server.url}/generate", content=content)
        assert answer.status_code == status, content[:20]


@pytest.mark.parametrize("prompt", [{"prompt": "1"}, {"messages": CHAT}])
def test_a_seed_does_not_end_the_engine_on_vllms_own_routes(
    shared_server: InferenceServer, prompt: dict[str, Any]
) -> None:
    """vLLM itself accepts the seed on CPU, but crashes if a prefill is chunked or recomputed."""
    route = "completions" if "prompt" in prompt else "chat/completions"
    body = {"model": str(shared_server.model), "seed": 1, "max_tokens": 2, **prompt}
    answer = httpx.post(f"{shared_server.url}/v1/{route}", json=body)
    assert answer.status_code == 400
    assert "seed: not supported per request on CPU" in answer.text


def test_unauthenticated_development_routes_are_off(shared_server: InferenceServer) -> None:
    for route in ("/pause", "/resume", "/sleep", "/collective_rpc", "/reset_prefix_cache"):
        assert httpx.post(f"{shared_server.url}{route}").status_code == 404
