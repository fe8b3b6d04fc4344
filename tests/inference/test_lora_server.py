"""A real server with LoRA adapters: the served name is the newest adapter, whatever the route."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from grpo_core.wire import PolicyVersion
from tests.fixtures.adapters import load, logprobs, make_adapter
from tests.fixtures.handed_off import HandedOffServer
from tests.fixtures.inference import FILE_MOVED, FILE_NOISE
from tests.inference.engine_load import in_time, running_requests, wait_for
from tests.inference.request_load import CLIENTS, load_on

SWAPS = 20
SHORT, LONG = [5, 6, 7], [(7 * i) % 200 for i in range(300)]
"""The second is longer than two blocks of cached keys and values."""

Sample = tuple[list[int], torch.Tensor, Any]
"""As `HandedOffServer.sample` returns it."""


def completion_logprobs(lora: HandedOffServer, model: str | None, chat: bool) -> torch.Tensor:
    """Of the tokens that greedy decoding gives on vLLM's own routes."""
    body: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "logprobs": 1}
    body |= {"model": model} if model is not None else {}
    if chat:
        body |= {"messages": [{"role": "user", "content": "1+1="}], "logprobs": True}
        answer = httpx.post(f"{lora.server.url}/v1/chat/completions", json=body, timeout=60)
        content = answer.raise_for_status().json()["choices"][0]["logprobs"]["content"]
        return torch.tensor([entry["logprob"] for entry in content])
    body["prompt"] = SHORT
    answer = httpx.post(f"{lora.server.url}/v1/completions", json=body, timeout=60)
    return torch.tensor(
        answer.raise_for_status().json()["choices"][0]["logprobs"]["token_logprobs"]
    )


@pytest.mark.parametrize("chat", [False, True])
def test_the_served_name_is_the_policy_on_every_route(lora: HandedOffServer, chat: bool) -> None:
    base = completion_logprobs(lora, f"{lora.name}@base", chat)
    lora.publish(lora.weights[0])
    served = completion_logprobs(lora, lora.name, chat)
    assert len(served) != len(base) or (served - base).abs().max() > FILE_MOVED
    unnamed = completion_logprobs(lora, None, chat)
    assert torch.allclose(unnamed, served, atol=FILE_NOISE)
    again = completion_logprobs(lora, f"{lora.name}@base", chat)
    assert torch.allclose(again, base, atol=FILE_NOISE)
    version = httpx.get(f"{lora.server.url}/lora/status").json()["adapter"]["adapter_name"]
    assert torch.allclose(completion_logprobs(lora, version, chat), served, atol=FILE_NOISE)
    listed = httpx.get(f"{lora.server.url}/v1/models").json()["data"]
    assert [model["id"] for model in listed] == [lora.name, f"{lora.name}@base", version]


def test_after_every_swap_the_new_adapter_is_served_and_nothing_of_the_one_before(
    lora: HandedOffServer,
) -> None:
    """On prompts whose keys and values the adapter before has cached, too."""
    policies = [load(lora.server.model, adapter) for adapter in lora.weights]
    lora.publish(lora.weights[0])
    for i in (1, 2, 0):
        lora.sample(LONG)
        version = lora.publish(lora.weights[i])
        for prompt in (SHORT, LONG):
            assert lora.difference(policies[i], prompt) < FILE_NOISE
            assert lora.difference(policies[i - 1], prompt) > FILE_MOVED
        assert lora.sample(SHORT)[2] == [list(version)] * 2


@dataclass(frozen=True)
class Overlap:
    """A completion of 500 tokens, during which the adapter was swapped, and a short one began."""

    version_before: PolicyVersion
    in_use: list[str]
    long: Sample
    short: Sample


def swap_during_a_request(lora: HandedOffServer) -> Overlap | None:
    """None where the request had ended before the short one."""
    before = lora.publish(lora.weights[0])
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(lora.sample, SHORT, 500)
        wait_for(lambda: running_requests(lora.server) > 0 or under_way.done())
        lora.publish(lora.weights[1])
        short = lora.sample(SHORT)
        used = in_use(lora)
        overlapped = running_requests(lora.server) > 0
        long = under_way.result()
    return Overlap(before, used, long, short) if overlapped else None


def in_use(lora: HandedOffServer) -> list[str]:
    adapters: list[str] = httpx.get(f"{lora.server.url}/lora/status").json()["in_use"]
    return adapters


def test_a_request_in_flight_finishes_on_the_adapter_that_it_began_with(
    lora: HandedOffServer,
) -> None:
    """Both are in one batch for a while, and each keeps to its own."""
    old, new = (load(lora.server.model, adapter) for adapter in lora.weights[:2])
    swap = in_time(lambda: swap_during_a_request(lora))
    assert swap.in_use == [str(adapter) for adapter in lora.weights[:2]]
    ids, logged, versions = swap.long
    assert versions == [list(swap.version_before)] * 2
    assert (logged - logprobs(old, SHORT, ids)).abs().max() < 10 * FILE_NOISE
    ids, logged, _ = swap.short
    assert (logged - logprobs(new, SHORT, ids)).abs().max() < FILE_NOISE
    wait_for(lambda: in_use(lora) == [str(lora.weights[1])])


def test_no_request_fails_in_twenty_swaps_under_load(lora: HandedOffServer) -> None:
    first = lora.publish(lora.weights[0])
    with load_on(lora.server.url) as report:
        report.wait_for_answers(3)
        for i in range(SWAPS):
            last = lora.publish(lora.weights[i % 3])
            report.wait_for_answers(3)  # so that some began with this adapter
        report.wait_for_answers(CLIENTS + 1)  # so that one began after the last swap
    assert report.problems == []
    assert {tuple(first), tuple(last)} <= set(report.versions)
    assert len(report.versions) > SWAPS / 2
    assert lora.server.status()["dropped_requests"] == 0


def test_an_adapter_that_cannot_be_served_is_refused_by_hand_too(
    lora: HandedOffServer, tmp_path: Path
) -> None:
    version = lora.publish(lora.weights[2])
    outside = make_adapter(lora.server.model, tmp_path / "outside", seed=1)
    large = make_adapter(
        lora.server.model, lora.weights[0].parent / f"rank64-{uuid.uuid4().hex}", seed=1, rank=64
    )
    odd = make_adapter(lora.server.model, lora.weights[0].parent / f"odd-{uuid.uuid4().hex}", 1)
    (odd / "adapter_model.safetensors").write_bytes(b"no safetensors")
    for path, status, says in (
        (outside, 422, "is not below"),
        (large, 422, "rank 64"),
        (odd, 409, "odd"),
    ):
        answer = httpx.post(f"{lora.server.url}/lora/load", json={"adapter_path": str(path)})
        assert answer.status_code == status, answer.text
        assert says in answer.json()["detail"]
    assert lora.sample(SHORT)[2] == [list(version)] * 2


def test_loading_by_hand_names_a_new_epoch_and_the_supervisor_learns_it(
    lora: HandedOffServer,
) -> None:
    lora.publish(lora.weights[2])
    epoch = httpx.get(f"{lora.server.url}/bridge/info").json()["policy_version"][0]
    body = {"lora_path": str(lora.weights[0]), "lora_name": "mine"}
    answer = httpx.post(f"{lora.server.url}/v1/load_lora_adapter", json=body)
    assert answer.json()["policy_version"] == [epoch + 1, 0]
    assert lora.difference(load(lora.server.model, lora.weights[0]), SHORT) < FILE_NOISE
    wait_for(lambda: lora.server.status()["epoch"] == epoch + 1)
    unloaded = httpx.post(f"{lora.server.url}/lora/unload", json={"adapter_name": ""})
    assert unloaded.json()["policy_version"] == [epoch + 2, 0]
    assert lora.difference(load(lora.server.model, None), SHORT) < FILE_NOISE
    wait_for(lambda: lora.server.status()["kind"] == "base")
