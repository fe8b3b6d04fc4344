"""The archived server's routes beside pause and resume, and the file that describes the weights."""

from __future__ import annotations

import json
import warnings
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
import torch
from fastapi import FastAPI
from safetensors.torch import load_file

from grpo_core.bridge_config import FILE_NAME, BridgeConfigNotFound, find_bridge_config
from grpo_core.inference_client import BridgeClient
from grpo_core.weight_socket import connect_weights
from grpo_core.wire import PolicyVersion
from grpo_trainer.weight_sync.mapped_memory import map_memory
from grpo_trainer.weight_sync.shared_views import MappedWeights
from grpo_vllm.bridge import WeightBridge
from grpo_vllm.serving_state import ServingState
from tests.fixtures.inference import InferenceServer
from tests.inference.engine_load import DEADLINE_S, wait_for
from tests.unit.vllm.fake_engine import FakeEngine


def post(server: InferenceServer, route: str, body: object = None) -> httpx.Response:
    return httpx.post(f"{server.control_url}/bridge/{route}", json=body, timeout=DEADLINE_S)


def health_generate(server: InferenceServer) -> httpx.Response:
    return httpx.get(f"{server.url}/health_generate", timeout=DEADLINE_S)


def test_one_token_can_be_generated(shared_server: InferenceServer) -> None:
    wait_for(lambda: generates(shared_server))


def generates(server: InferenceServer) -> bool:
    """Within the 5 s that the server gives itself."""
    answer = health_generate(server)
    if answer.status_code == 503:
        assert "no token within 5 s" in answer.json()["detail"]
        return False
    assert (answer.status_code, answer.content) == (200, b"")
    return True


def test_a_server_that_is_paused_does_not_generate_within_the_deadline(
    shared_server: InferenceServer,
) -> None:
    with (
        BridgeClient(shared_server.url) as bridge,
        connect_weights(shared_server.socket) as connection,
    ):
        session = connection.grant.session
        epoch, _ = bridge.info().policy_version
        bridge.pause(session, 60.0, PolicyVersion(epoch + 1, 0))
        try:
            assert httpx.get(f"{shared_server.url}/health", timeout=DEADLINE_S).status_code == 200
            answer = health_generate(shared_server)
            assert answer.status_code == 503
            assert "no token within 5 s" in answer.json()["detail"]
        finally:
            bridge.resume(session, written=False)
        wait_for(lambda: generates(shared_server))


@pytest.mark.parametrize("body", [None, {}, {"lease_s": 5}])
def test_a_pause_without_a_session_is_told_what_it_takes(
    shared_server: InferenceServer, body: object
) -> None:
    """The archived server paused without a limit for anybody; here a pause has an owner."""
    answer = post(shared_server, "pause", body)
    assert answer.status_code == 422
    for part in ("session", "lease_s", "policy_version", "weight socket"):
        assert part in answer.json()["detail"]
    assert not httpx.get(f"{shared_server.url}/bridge/info").json()["paused"]


def test_an_update_notice_changes_no_version(shared_server: InferenceServer) -> None:
    before = httpx.get(f"{shared_server.url}/bridge/info").json()
    answer = post(shared_server, "notify_update").raise_for_status().json()
    after = httpx.get(f"{shared_server.url}/bridge/info").json()
    assert answer["status"] == "ok"
    assert answer["notice_count"] == after["notice_count"] == before["notice_count"] + 1
    assert answer["update_count"] == before["update_count"]
    assert answer["policy_version"] == before["policy_version"]
    assert answer["prefix_cache_reset"] is True


@pytest.mark.parametrize("route", ["sleep", "wake_up"])
def test_a_server_that_shares_its_weights_does_not_sleep(
    shared_server: InferenceServer, route: str
) -> None:
    answer = post(shared_server, route)
    assert answer.status_code == 409
    assert "would discard the weights" in answer.json()["detail"]
    for fact in ("is_sleeping", "is_paused"):
        state = httpx.get(f"{shared_server.control_url}/bridge/{fact}").json()
        assert list(state.values()) == [False]


async def test_a_server_that_cannot_sleep_says_so() -> None:
    """Without shared weights, where vLLM offers no sleep mode. No server is needed to ask."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vLLM's own dependencies
        from grpo_vllm.routes.bridge_control import sleep_router
    engine = FakeEngine()
    app = FastAPI()
    app.include_router(sleep_router(WeightBridge(engine), False, "no sleep mode on this CPU"))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        for route in ("sleep", "wake_up"):
            answer = await client.post(f"/bridge/{route}")
            assert answer.status_code == 501
            assert "the engine cannot sleep: no sleep mode" in answer.json()["detail"]
    assert engine.calls == []


async def test_a_server_that_can_sleep_tells_its_state() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from grpo_vllm.routes.bridge_control import sleep_router
    engine = FakeEngine()
    bridge = WeightBridge(engine)
    app = FastAPI()
    app.include_router(sleep_router(bridge, False, None))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        assert (await client.post("/bridge/sleep")).json() == {"status": "sleeping"}
        assert bridge.state is ServingState.SLEEPING
        assert (await client.get("/bridge/is_sleeping")).json() == {"sleeping": True}
        assert (await client.post("/bridge/wake_up")).json() == {"status": "awake"}
    assert bridge.state is ServingState.SERVING
    assert engine.calls == ["sleep", "wake_up"]


def test_the_state_is_told(shared_server: InferenceServer) -> None:
    info = httpx.get(f"{shared_server.url}/bridge/info").json()
    assert (info["state"], info["state_reason"]) == ("serving", None)
    with (
        BridgeClient(shared_server.url) as bridge,
        connect_weights(shared_server.socket) as connection,
    ):
        session = connection.grant.session
        bridge.pause(session, 60.0, PolicyVersion(info["policy_version"][0] + 1, 0))
        assert httpx.get(f"{shared_server.url}/bridge/info").json()["state"] == "paused"
        bridge.resume(session, written=False)


def test_the_bridge_config_says_what_the_routes_say(shared_server: InferenceServer) -> None:
    described = httpx.get(f"{shared_server.url}/bridge/state_dict_info").json()
    config = find_bridge_config(shared_server.bridge_config, {}, described["generation"])
    assert described == {**config.model_dump(mode="json"), "shared_weights_enabled": True}
    assert config.weights_socket == shared_server.socket
    assert config.device == "cpu"
    assert shared_server.bridge_config.stat().st_mode & 0o777 == 0o600
    with connect_weights(shared_server.socket) as connection:
        assert connection.grant.manifest.parameters == config.param_mappings
        assert connection.grant.manifest.generation == config.generation


def test_a_trainer_that_looks_for_another_server_is_told_which_it_found(
    shared_server: InferenceServer,
) -> None:
    directory = str(shared_server.bridge_config.parent)
    with pytest.raises(BridgeConfigNotFound, match="another or earlier server"):
        find_bridge_config(None, {"LOGDIR": directory}, "an-engine-that-ended")


def test_slices_put_together_are_the_servers_parameters(shared_server: InferenceServer) -> None:
    """Every fused parameter is covered without gap or overlap, in the memory and in its rows."""
    config = find_bridge_config(shared_server.bridge_config, {}, None)
    fused: dict[str, list[tuple[int, int, int, int]]] = {}
    for mapping in config.param_mappings.values():
        if mapping.slice is not None:
            start, stop = mapping.slice
            assert mapping.shape[0] == stop - start
            fused.setdefault(mapping.vllm_name, []).append(
                (start, stop, mapping.offset, mapping.offset + mapping.nbytes)
            )
    qkv = sorted(fused["model.layers.0.self_attn.qkv_proj.weight"])
    gate_up = sorted(fused["model.layers.0.mlp.gate_up_proj.weight"])
    assert [(start, stop) for start, stop, _, _ in qkv] == [(0, 128), (128, 192), (192, 256)]
    assert [(start, stop) for start, stop, _, _ in gate_up] == [(0, 512), (512, 1024)]
    for parts in fused.values():
        for (_, stop, _, end), (start, _, offset, _) in pairwise(sorted(parts)):
            assert (start, offset) == (stop, end)


def test_the_memory_holds_the_checkpoint_where_the_mapping_says(
    shared_server: InferenceServer,
) -> None:
    checkpoint = load_file(Path(shared_server.model) / "model.safetensors")
    with connect_weights(shared_server.socket) as connection:
        weights = MappedWeights(connection.grant.manifest, map_memory(connection))
        mappings = weights.manifest.parameters
        assert set(checkpoint) <= set(mappings)
        for name, tensor in checkpoint.items():
            assert torch.equal(weights.view(mappings[name]), tensor.float())


def test_the_file_has_the_archived_name(shared_server: InferenceServer) -> None:
    assert shared_server.bridge_config.name == FILE_NAME
    content = json.loads(shared_server.bridge_config.read_text())
    assert {"model", "dtype", "param_mappings"} <= set(content)
