"""A real server with LoRA adapters: the served name is the newest adapter on every route."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from safetensors.torch import load_file, save_file
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from grpo_core.clients.inference import BridgeClient, Completion
from grpo_core.weights.versions import version_id
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checks.served_weights import ProbeLengths, PublicationCheck
from grpo_trainer.errors import ServedWeightsDiffer
from tests.fixtures.adapters import load, logprobs, make_adapter
from tests.fixtures.file_sync import HandedOffServer, serve_by_hand
from tests.fixtures.inference import FILE_MOVED, FILE_NOISE
from tests.inference.request_load import load_on, running_sequences
from tests.negative_controls.grpo_negative_controls import control_plugin
from tests.support.wait import wait_for

SHORT, LONG = [5, 6, 7], [(7 * i) % 200 for i in range(300)]
"""The second prompt is longer than two blocks of the KV cache."""

Sample = tuple[list[int], torch.Tensor, Any]
"""Token ids, their logprobs and the policy versions."""


def completion_logprobs(lora: HandedOffServer, model: str | None, chat: bool) -> torch.Tensor:
    """The logprobs of greedy decoding on vLLM's own routes."""
    body: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "logprobs": 1}
    body |= {"model": model} if model is not None else {}
    if chat:
        body |= {"messages": [{"role": "user", "content": "1+1="}], "logprobs": True}
        answer = httpx.post(f"{lora.server.url}/v1/chat/completions", json=body)
        content = answer.raise_for_status().json()["choices"][0]["logprobs"]["content"]
        return torch.tensor([entry["logprob"] for entry in content])
    answer = httpx.post(f"{lora.server.url}/v1/completions", json=body | {"prompt": SHORT})
    found = answer.raise_for_status().json()["choices"][0]["logprobs"]["token_logprobs"]
    return torch.tensor(found)


def lora_status(lora: HandedOffServer) -> Any:
    return httpx.get(f"{lora.server.url}/lora/status").raise_for_status().json()


@pytest.mark.parametrize("chat", [False, True])
def test_the_served_name_is_the_policy_on_every_route(lora: HandedOffServer, chat: bool) -> None:
    base_name = f"{lora.name}@base"
    base = completion_logprobs(lora, base_name, chat)
    lora.publish(lora.weights[0])
    served = completion_logprobs(lora, lora.name, chat)
    assert len(served) != len(base) or (served - base).abs().max() > FILE_MOVED
    adapter_name = lora_status(lora)["adapter"]["adapter_name"]
    for name, expected in ((None, served), (adapter_name, served), (base_name, base)):
        assert torch.allclose(completion_logprobs(lora, name, chat), expected, atol=FILE_NOISE)
    listed = httpx.get(f"{lora.server.url}/v1/models").json()["data"]
    assert [model["id"] for model in listed] == [lora.name, base_name, adapter_name]


def test_after_every_swap_the_new_adapter_is_served_and_nothing_of_the_one_before(
    lora: HandedOffServer,
) -> None:
    """This includes prompts that are in the KV cache of the previous adapter."""
    policies = [load(lora.server.model, adapter) for adapter in lora.weights[:2]]
    lora.publish(lora.weights[0])
    for before, after in ((0, 1), (1, 0)):
        lora.sample(LONG)
        version = lora.publish(lora.weights[after])
        for prompt in (SHORT, LONG):
            assert lora.difference(policies[after], prompt) < FILE_NOISE
            assert lora.difference(policies[before], prompt) > FILE_MOVED
        assert lora.sample(SHORT)[2] == [list(version)] * 2


@dataclass(frozen=True)
class Overlap:
    """A completion of 200 tokens during which the adapter changed, and a short one started
    afterwards."""

    version_before: PolicyVersion
    version: PolicyVersion
    in_use: list[str]
    long: Sample
    short: Sample


def swap_during_a_request(lora: HandedOffServer) -> Overlap | None:
    """None if the long request ended before the short one."""
    before = lora.publish(lora.weights[0])
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(lora.sample, SHORT, 200)
        wait_for(lambda: running_sequences(lora.server) > 0 or long.done())
        version = lora.publish(lora.weights[1])
        short = lora.sample(SHORT)
        in_use = lora_status(lora)["in_use"]
        overlapped = running_sequences(lora.server) > 0
        return Overlap(before, version, in_use, long.result(), short) if overlapped else None


def test_a_request_in_flight_finishes_on_the_adapter_that_it_began_with(
    lora: HandedOffServer,
) -> None:
    """Both requests share a batch for a while, and each keeps its own adapter."""
    old, new = (load(lora.server.model, adapter) for adapter in lora.weights[:2])
    swap = wait_for(lambda: swap_during_a_request(lora), lambda overlap: overlap is not None)
    assert swap is not None
    assert len(swap.in_use) == 2
    assert swap.in_use[-1] == str(lora.published(swap.version))
    ids, logged, versions = swap.long
    assert versions == [list(swap.version_before)] * 2
    assert (logged - logprobs(old, SHORT, ids)).abs().max() < 10 * FILE_NOISE
    ids, logged, _ = swap.short
    assert (logged - logprobs(new, SHORT, ids)).abs().max() < FILE_NOISE
    wait_for(lambda: lora_status(lora)["in_use"] == swap.in_use[1:])


@pytest.mark.parametrize("swaps", [3, pytest.param(20, marks=pytest.mark.full)])
def test_no_request_fails_in_swaps_under_load(swaps: int, lora: HandedOffServer) -> None:
    first = lora.publish(lora.weights[0])
    with load_on(lora.server.url) as report:
        report.wait_for_answers(3)
        for i in range(swaps):
            last = lora.publish(lora.weights[i % 3])
            wait_for(lambda version=tuple(last): report.versions[version])
    assert report.problems == []
    assert tuple(first) in report.versions
    assert lora.server.status()["dropped_requests"] == 0


def test_the_same_adapter_under_another_name_is_not_loaded_again(lora: HandedOffServer) -> None:
    lora.publish(lora.weights[1])
    name = lora_status(lora)["adapter"]["adapter_name"]
    version = lora.publish(lora.weights[1])
    assert lora.sample(SHORT)[2] == [list(version)] * 2
    assert lora_status(lora)["adapter"]["adapter_name"] == name


def test_an_adapter_that_was_fetched_is_served_from_the_staging_directory(
    lora: HandedOffServer, tmp_path: Path
) -> None:
    served = lora.publish(lora.weights[1])
    version = PolicyVersion(served.epoch, served.step + 1)
    hidden = shutil.copytree(lora.weights[2], tmp_path / version_id(version))
    with http_files(tmp_path) as url:
        announced = lora.announcer.announce(version, hidden, (url,))
        status = lora.announcer.settled(announced)
    assert (status.version, Path(status.path).parents[1].name) == (version, "staging")
    assert lora.difference(load(lora.server.model, lora.weights[2]), SHORT) < FILE_NOISE


@contextlib.contextmanager
def http_files(directory: Path) -> Iterator[str]:
    """URL below which files of the directory are read by ranges."""
    app = Starlette(routes=[Mount("/weights", StaticFiles(directory=directory))])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/weights"
        finally:
            server.should_exit = True
            thread.join()


def test_loading_by_hand_names_a_new_epoch_and_the_supervisor_learns_it(
    lora: HandedOffServer,
) -> None:
    epoch = lora.publish(lora.weights[2]).epoch
    body = {"lora_path": str(lora.weights[0]), "lora_name": "mine"}
    loaded = httpx.post(f"{lora.server.url}/v1/load_lora_adapter", json=body)
    assert loaded.json()["policy_version"] == [epoch + 1, 0]
    assert lora.difference(load(lora.server.model, lora.weights[0]), SHORT) < FILE_NOISE
    wait_for(lambda: lora.server.status()["epoch"] == epoch + 1)
    unloaded = httpx.post(f"{lora.server.url}/lora/unload", json={"adapter_name": ""})
    assert unloaded.json()["policy_version"] == [epoch + 2, 0]
    assert lora.difference(load(lora.server.model, None), SHORT) < FILE_NOISE
    wait_for(lambda: lora.server.status()["kind"] == "base")


def test_an_adapter_of_another_layout_is_refused_and_the_served_one_stays(
    lora: HandedOffServer,
) -> None:
    lora.publish(lora.weights[1])
    place = lora.weights[0].with_name("foreign")
    shutil.copytree(lora.weights[0], place)
    file = place / "adapter_model.safetensors"
    renamed = {n.replace("layers.0.", "layer_0."): t for n, t in load_file(file).items()}
    save_file(renamed, file)
    refused = httpx.post(f"{lora.server.url}/lora/load", json={"adapter_path": str(place)})
    assert refused.status_code == 409
    assert "2 of its 5 modules are not in the model, for example model.layer_0." in refused.text
    config = place / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 16', '"r": 8'))
    refused = httpx.post(f"{lora.server.url}/lora/load", json={"adapter_path": str(place)})
    assert (refused.status_code, "gives rank 8" in refused.text) == (422, True)
    assert lora.difference(load(lora.server.model, lora.weights[1]), SHORT) < FILE_NOISE


@dataclass
class Asked:
    """The server, with the methods that `PublicationCheck` calls."""

    bridge: BridgeClient

    def served_logprobs(self, token_ids: list[int]) -> list[float]:
        return self.bridge.prompt_logprobs(token_ids)

    def sample(self, prompt_token_ids: list[int], max_tokens: int) -> Completion:
        return self.bridge.sample(
            prompt_token_ids, max_tokens=max_tokens, temperature=1.0, ignore_eos=True
        )


@torch.no_grad()
def hold(policy: Any, other: Any) -> None:
    """Replace the policy's weights by those of `other`, as if training had produced them."""
    ours = dict(policy.named_parameters())
    for name, parameter in other.named_parameters():
        ours[name].copy_(parameter)


def test_keys_and_values_that_outlive_a_swap_are_found(
    tiny_model: Path, redis_url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    adapters = [make_adapter(tiny_model, folder / f"adapter-{i}", seed=i) for i in range(2)]
    policy, second = (load(tiny_model, adapter) for adapter in adapters)
    environment = control_plugin("kept_kv", tmp_path)
    with (
        serve_by_hand(
            tiny_model, redis_url, tmp_path, adapters, "--enable-lora", environment=environment
        ) as faulty,
        BridgeClient(faulty.server.url) as bridge,
    ):
        info = bridge.info()
        lengths = ProbeLengths.fitting(info.kv_block_size, info.max_model_len)
        check = PublicationCheck(policy, Asked(bridge), lengths)
        version = faulty.publish(adapters[0])
        assert check.require(version, "first").max < FILE_NOISE
        hold(policy, second)
        check.prime()
        version = faulty.publish(adapters[1])
        with pytest.raises(ServedWeightsDiffer, match="still in the server's KV cache"):
            check.require(version, "swapped")
