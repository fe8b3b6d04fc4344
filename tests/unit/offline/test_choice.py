"""The server says how new weights can reach it; stock vLLM is sampled from as it is."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_core.errors import ProtocolViolation
from grpo_offline.backends.choice import Sampling, choose
from grpo_offline.backends.opening import StockVllm
from grpo_offline.errors import ServerUnsuitable
from grpo_offline.keys import OfflineKeys
from tests.support.http_stub import stub_server

OURS = {"policy_version": [0, 0], "paused": False, "weights_intact": True}


def keys(url: str, backend: str = "vllm_server", mode: str = "auto") -> OfflineKeys:
    generation = {"backend": backend, "base_url": url}
    return OfflineKeys.model_validate({"generation": generation, "sync": {"mode": mode}})


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"weights_socket": "/s", "lora_enabled": False}, "shared_vllm"),
        ({"weights_socket": None, "lora_enabled": True}, "lora_only"),
        ({"weights_socket": None, "lora_enabled": False}, "none"),
    ],
)
def test_our_server_is_asked_for_its_mode(said: dict[str, Any], expected: str) -> None:
    with stub_server({"GET /bridge/info": lambda _: (200, OURS | said)}) as stub:
        assert choose(keys(stub.url)) == Sampling("ours", expected)  # type: ignore[arg-type]
        assert choose(keys(stub.url, mode="lora_restart")).mode == "lora_restart"
        assert choose(keys(stub.url, mode="frozen")).is_frozen


def test_another_vllm_server_keeps_its_weights() -> None:
    with stub_server({"GET /bridge/info": lambda _: (404, {})}) as stub:
        assert choose(keys(stub.url)) == Sampling("stock_vllm", "frozen")
        with pytest.raises(ServerUnsuitable, match="start vllm-api-server at"):
            choose(keys(stub.url, mode="shared_vllm"))


@pytest.mark.parametrize("mode", ["shared_vllm", "frozen"])
def test_sampling_in_this_process_has_one_mode(mode: str) -> None:
    assert choose(keys("http://h:1", "local")) == Sampling("local", "local")
    with pytest.raises(ServerUnsuitable, match="has no server"):
        choose(keys("http://h:1", "local", mode))


def completions(_body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    choice = {"text": "7", "finish_reason": "stop", "token_ids": [5, 2]}
    return 200, {"choices": [choice, choice | {"finish_reason": "length"}]}


async def test_stock_vllm_is_asked_for_token_ids_and_gives_no_logprobs() -> None:
    with stub_server({"POST /v1/completions": completions}) as stub:
        async with StockVllm(stub.url, "m", 10.0, 4) as client:
            answer = await client.generate([1, 2, 3], n=2, max_tokens=4, temperature=0.5)
        (body,) = stub.bodies("POST /v1/completions")
    assert body["prompt"] == [1, 2, 3]
    assert (body["model"], body["n"], body["temperature"]) == ("m", 2, 0.5)
    assert answer.token_ids == [[5, 2], [5, 2]]
    assert answer.finish_reasons == ["stop", "length"]
    assert [c.logprobs for c in answer.completions()] == [[0.0, 0.0]] * 2


async def test_an_old_vllm_without_token_ids_is_named() -> None:
    def old(_body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 200, {"choices": [{"text": "7", "finish_reason": "stop"}]}

    with stub_server({"POST /v1/completions": old}) as stub:
        async with StockVllm(stub.url, "m", 10.0, 4) as client:
            with pytest.raises(ProtocolViolation, match=r"use vLLM 0\.10\.2 or later"):
                await client.generate([1], max_tokens=4)
