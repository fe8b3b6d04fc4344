"""`POST /generate` and the facts of `/bridge/*`, over HTTP against vLLM."""

from __future__ import annotations

import json
import select
import socket
from typing import Any

import httpx
import pytest

from grpo_core.inference_client import GenerateAnswer
from tests.fixtures.inference import InferenceServer
from tests.inference.engine_load import DEADLINE_S, all_run, in_time, unfinished_after_steps

PROMPT = {"prompt_token_ids": [5, 6, 7, 8]}
DEFAULTS: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 5, "logprobs": 0, "ignore_eos": True}


def post(server: InferenceServer, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/generate", json=DEFAULTS | body, timeout=60)


def test_the_answer_has_the_shape_of_the_contract(shared_server: InferenceServer) -> None:
    answer = post(shared_server, n=3).raise_for_status().json()
    assert len(answer["text"]) == len(answer["token_ids"]) == 3
    assert answer["finish_reasons"] == ["length"] * 3
    assert answer["prompt_token_ids"] == PROMPT["prompt_token_ids"]
    assert isinstance(answer["prompt"], str)
    for tokens, logprobs in zip(answer["token_ids"], answer["logprobs"], strict=True):
        assert len(tokens) == len(logprobs) == 5
        for token, entry in zip(tokens, logprobs, strict=True):
            (alternatives,) = entry
            assert next(iter(alternatives)) == str(token)
            assert -50 < alternatives[str(token)] <= 0
    for first, last in answer["policy_version"]:
        assert first <= last


def test_the_sampled_token_comes_first_among_alternatives(shared_server: InferenceServer) -> None:
    answer = post(shared_server, logprobs=5, n=8, temperature=1.5).raise_for_status().json()
    for tokens, logprobs in zip(answer["token_ids"], answer["logprobs"], strict=True):
        for token, (alternatives,) in zip(tokens, logprobs, strict=True):
            assert next(iter(alternatives)) == str(token)
            assert len(alternatives) in (5, 6)


def test_logprobs_are_only_sent_when_asked_for(shared_server: InferenceServer) -> None:
    body = {k: v for k, v in DEFAULTS.items() if k != "logprobs"}
    answer = httpx.post(f"{shared_server.url}/generate", json=body, timeout=60).json()
    assert "logprobs" not in answer
    assert len(answer["token_ids"][0]) == 5


def test_text_prompts_and_stop_tokens(shared_server: InferenceServer) -> None:
    prompt = "<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n"
    body = {"prompt": prompt, "max_tokens": 20, "logprobs": 0}
    answer = httpx.post(f"{shared_server.url}/generate", json=body, timeout=60).json()
    parsed = GenerateAnswer.model_validate(answer)
    assert answer["prompt"] == prompt
    (completion,) = parsed.completions()
    assert completion.finish_reason == "stop"
    assert len(completion.token_ids) < 20


def test_prompt_logprobs(shared_server: InferenceServer) -> None:
    answer = post(shared_server, prompt_logprobs=0).raise_for_status().json()
    first, *rest = answer["prompt_logprobs"]
    assert first is None
    assert [list(entry) for entry in rest] == [["6"], ["7"], ["8"]]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": {"prompt_token_ids": []}}, "prompt"),
        ({"prompt": {"prompt_token_ids": [1, 99999]}}, "prompt_token_ids[1]"),
        ({"prompt": {"prompt_token_ids": [1, "x"]}}, "prompt_token_ids[1]"),
        ({"prompt": {"prompt_token_ids": [1] * 600}}, "600 tokens"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"best_off": 3}, "best_off"),
        ({"n": 0}, "n"),
        ({"n": "many"}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": 7}, "top_p"),
        ({"seed": 1}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"logprobs": 1000}, "logprobs"),
    ],
)
def test_bad_input_is_a_4xx_that_names_it(
    shared_server: InferenceServer, body: dict[str, Any], named: str
) -> None:
    answer = post(shared_server, **body)
    assert 400 <= answer.status_code < 500
    assert named in answer.text


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"prompt": NaN}', b"[" * 100_000])
def test_bodies_that_are_no_json_object(shared_server: InferenceServer, content: bytes) -> None:
    answer = httpx.post(f"{shared_server.url}/generate", content=content, timeout=60)
    assert answer.status_code == 400


def test_a_dropped_connection_aborts_the_request_in_the_engine(
    shared_server: InferenceServer,
) -> None:
    """Each of the 32 completions has hundreds of tokens to go; dropped, it gets no further."""
    assert in_time(lambda: dropped_in_the_middle(shared_server))
    assert unfinished_after_steps(shared_server) < 16


def dropped_in_the_middle(server: InferenceServer) -> bool | None:
    """None where it was answered before."""
    body = json.dumps(DEFAULTS | {"max_tokens": 500, "n": 32}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    port = httpx.URL(server.url).port
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head + body)
        return all_run(server, 32, lambda: has_answered(connection)) or None


def has_answered(connection: socket.socket) -> bool:
    readable, _, _ = select.select([connection], [], [], 0)
    return bool(readable)


def test_the_openai_routes_are_there(shared_server: InferenceServer) -> None:
    models = httpx.get(f"{shared_server.url}/v1/models", timeout=DEADLINE_S).json()
    (model,) = models["data"]
    assert model["id"] == str(shared_server.model)
    answer = httpx.post(
        f"{shared_server.url}/v1/chat/completions",
        json={
            "model": model["id"],
            "messages": [{"role": "user", "content": "1+1="}],
            "max_tokens": 4,
        },
        timeout=60,
    )
    assert answer.raise_for_status().json()["choices"][0]["message"]["role"] == "assistant"


def test_unauthenticated_development_routes_are_off(shared_server: InferenceServer) -> None:
    for route in ("/pause", "/resume", "/sleep", "/collective_rpc", "/reset_prefix_cache"):
        assert httpx.post(f"{shared_server.url}{route}", timeout=DEADLINE_S).status_code == 404


def test_the_bridge_tells_what_it_shares(shared_server: InferenceServer) -> None:
    info = httpx.get(f"{shared_server.url}/bridge/info", timeout=DEADLINE_S).json()
    assert info["enabled"]
    assert info["weights_socket"] == str(shared_server.socket)
    details = httpx.get(f"{shared_server.url}/bridge/state_dict_info", timeout=DEADLINE_S).json()
    mapping = details["param_mappings"]["model.layers.0.self_attn.k_proj.weight"]
    assert mapping["shape"] == [64, 128]
    assert mapping["dtype"] == "float32"
    assert details["total_bytes"] > 4_000_000
