from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from grpo_core.handoff import ServerStatus, SupervisorState
from grpo_vllm.api_key import ApiKeyGuard
from grpo_vllm.settings import load_server_settings
from grpo_vllm.supervisor.health_server import health_app

KEYS = ("one-key", "another")
GUARDED = ("/generate", "/bridge/info", "/bridge/pause", "/lora/load", "/v1/models", "/docs")


async def status(app: object, path: str, *words: str) -> int:
    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        headers = {"authorization": " ".join(words)} if words else {}
        return (await client.get(path, headers=headers)).status_code


async def test_every_route_asks_for_the_key_but_those_of_probes() -> None:
    routes = [Route("/{rest:path}", lambda _: Response())]
    app = ApiKeyGuard(Starlette(routes=routes), KEYS)
    for path in GUARDED:
        assert [await status(app, path, "Bearer", key) for key in KEYS] == [200, 200]
        for wrong in ((), ("Bearer", "one"), ("Basic", "one-key")):
            assert await status(app, path, *wrong) == 401
    assert [await status(app, path) for path in ("/health", "/metrics")] == [200, 200]
    assert await status(ApiKeyGuard(Starlette(routes=routes), ()), "/generate") == 200


async def test_the_supervisors_status_asks_for_it_too() -> None:
    serving = ServerStatus(state=SupervisorState.SERVING, epoch=0, step=0)
    app = health_app(lambda: serving, lambda: True, KEYS)
    assert [await status(app, path) for path in ("/healthz", "/readyz")] == [200, 200]
    assert await status(app, "/status") == 401
    assert await status(app, "/status", "Bearer", "another") == 200


@pytest.mark.parametrize(
    ("flags", "variable", "keys"),
    [
        (["--api-key", "a", "b", "--seed", "1"], "c", ("a", "b")),
        (["--api_key=a"], "", ("a",)),
        ([], "c", ("c",)),
        ([], "", ()),
    ],
)
def test_the_key_is_given_as_vllm_takes_it(
    flags: list[str], variable: str, keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", variable)
    assert load_server_settings(["--model", "m", *flags]).api_keys == keys
