"""Everything that listens, and that each of them refuses pages of other sites and names that an
attacker's DNS server could resolve to it. docs/explanation/security.md has the same list."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from starlette.types import ASGIApp

from grpo_api.app import create_app
from grpo_core.settings import load_settings
from grpo_core.tree.run_api import RunApiSettings
from grpo_core.tree.server import ServerSettings
from grpo_env.bridges.endpoint import ChatEndpoint
from grpo_runs.watch.api import watch_app
from grpo_trainer.weight_sync.source import WeightSource
from grpo_vllm.supervisor.main import health_app

ROOT = Path(__file__).parents[2]
OPENS = {"create_server", "start_server", "start_http_server", "TCPSite", "UnixSite", "listen"}
LISTENERS = {
    "services/run-api/grpo_api/server.py": "run-api",
    # Its public and control port are tested with the engine, in tests/inference/test_bridge.py.
    "services/vllm-server/grpo_vllm/supervisor/host.py": "the inference server",
    "services/trainer/grpo_trainer/weight_sync/source.py": "the trainer's weights",
    "services/trainer/grpo_trainer/weight_sync/collective.py": "the store of a process group",
    "services/runs/grpo_runs/watch/serve.py": "the live page",
    "services/environment/grpo_env/bridges/endpoint.py": "agents: each request needs its key",
    "shared/grpo_core/metrics_port.py": "metrics, for any name, as on every port",
    "shared/grpo_core/listening.py": "opens the sockets of those above",
    # Not HTTP, or the endpoint of agents once more.
    "services/environment/grpo_env/sandbox/host.py": "passes the endpoint on, on loopback",
    "services/environment/grpo_env/sandbox/relay.py": "the same, inside a sandbox",
    "services/vllm-server/grpo_vllm/weights/socket_server.py": "a Unix socket of the user",
    "services/trainer/grpo_trainer/__main__.py": "waits for signals",
}


def test_everything_that_listens_is_in_this_table() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in ("services", "shared")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and _listens(node)
    }
    assert found == LISTENERS.keys()


def _listens(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return name in OPENS or (
        name == "Config" and any(keyword.arg == "port" for keyword in call.keywords)
    )


def server(*words: str) -> Any:
    return load_settings(ServerSettings, ["--model", "m", "--redis-url", "none", *words])


APPS: dict[str, Callable[[], ASGIApp]] = {
    "run-api": lambda: create_app(Mock(), RunApiSettings(), asyncio.Event()),
    "health port": lambda: health_app(lambda: SimpleNamespace(), lambda: True, server()),
    "live page": lambda: watch_app([]),
}
REBOUND = {"host": "evil.example.com"}
OTHER_SITE = {"host": "127.0.0.1", "sec-fetch-site": "cross-site"}


@pytest.mark.parametrize("headers", [REBOUND, OTHER_SITE])
@pytest.mark.parametrize("name", APPS)
async def test_a_port_refuses_pages_of_other_sites(name: str, headers: dict[str, str]) -> None:
    transport = httpx.ASGITransport(APPS[name]())
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answer = await client.get("/status", headers=headers)
    assert (answer.status_code, "rejected" in answer.text) == (403, True)


@pytest.mark.parametrize(
    "words",
    [
        ("--advertise-url", "http://a.example"),
        ("--control-host", "a.example", "--control-port", "1"),
    ],
)
async def test_a_name_by_which_others_reach_the_server_is_its_own(words: tuple[str, ...]) -> None:
    app = health_app(lambda: _Serving(), lambda: True, server(*words))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://a.example") as client:
        assert (await client.get("/status")).status_code == 200


class _Serving:
    def model_dump(self, mode: str) -> dict[str, str]:
        return {"mode": mode}


def test_the_trainers_weights_are_for_its_own_names_alone(tmp_path: Path) -> None:
    (tmp_path / "1-5").mkdir()
    (tmp_path / "1-5" / "model.safetensors").write_bytes(b"weights")
    source = WeightSource(tmp_path, None, 0, None)
    url = f"{source.open()[1]}/1-5/model.safetensors"
    try:
        with httpx.Client(trust_env=False) as client:
            assert client.get(url).content == b"weights"
            for headers in (REBOUND, OTHER_SITE):
                assert client.get(url, headers=headers).status_code == 403
    finally:
        source.close()


async def test_the_endpoint_of_agents_needs_the_key_of_a_rollout() -> None:
    async with (
        ChatEndpoint("Authorization") as endpoint,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        answer = await client.post(f"{endpoint.url}/chat/completions", headers=REBOUND, json={})
    assert answer.status_code == 401
