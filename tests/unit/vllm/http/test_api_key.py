from __future__ import annotations

import httpx
import pytest
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from grpo_core.security import plain
from grpo_core.weights.supervisor import SupervisorPhase, SupervisorStatus
from grpo_vllm.http.server import require_api_key
from grpo_vllm.settings import load_server_settings
from grpo_vllm.supervisor.main import health_app

KEY = SecretStr("one-key")
GUARDED = ("/generate", "/bridge/info", "/bridge/pause", "/lora/load", "/v1/models", "/docs")


async def status(app: object, path: str, *words: str) -> int:
    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        headers = {"authorization": " ".join(words)} if words else {}
        return (await client.get(path, headers=headers)).status_code


async def test_every_route_asks_for_the_key_but_those_of_probes() -> None:
    routes = [Route("/{rest:path}", lambda _: Response())]
    app = require_api_key(Starlette(routes=routes), KEY)
    for path in GUARDED:
        assert await status(app, path, "Bearer", "one-key") == 200
        for wrong in ((), ("Bearer", "one"), ("Basic", "one-key")):
            assert await status(app, path, *wrong) == 401
    assert [await status(app, path) for path in ("/health", "/metrics")] == [200, 200]
    assert await status(require_api_key(Starlette(routes=routes), None), "/generate") == 200


async def test_the_supervisors_status_asks_for_it_too() -> None:
    serving = SupervisorStatus(state=SupervisorPhase.SERVING, epoch=0, step=0)
    app = health_app(lambda: serving, lambda: True, KEY)
    assert [await status(app, path) for path in ("/healthz", "/readyz")] == [200, 200]
    assert await status(app, "/status") == 401
    assert await status(app, "/status", "Bearer", "one-key") == 200


@pytest.mark.parametrize(
    ("flags", "variable", "key", "passed_on"),
    [
        (["--api-key", "a", "-tp", "2"], "c", "a", ["-tp", "2"]),
        (["--api_key=a", "--api-key", "b"], "", "b", []),
        ([], "", None, []),
    ],
)
def test_one_key_is_taken_and_not_passed_on(
    flags: list[str],
    variable: str,
    key: str | None,
    passed_on: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", variable)
    settings = load_server_settings(["--model", "m", *flags])
    assert (plain(settings.api_key), settings.engine_arguments) == (key, tuple(passed_on))


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(SystemExit, match="2"):
        load_server_settings(["--model", "m", "--api-key", ""])
