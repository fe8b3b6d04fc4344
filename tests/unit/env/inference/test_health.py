from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from grpo_core.errors import ServiceUnavailable
from grpo_env.inference.health import (
    NotAnInferenceServer,
    SharedWeightsHaveOneServer,
    wait_for_servers,
)
from tests.unit.env.http_stub import Route, stub_server
from tests.unit.env.inference.engine import engines

GENEROUS_S = 60.0


def missing(_body: object) -> tuple[int, dict[str, str]]:
    return 404, {"detail": "Not Found"}


async def test_one_healthy_server_is_enough() -> None:
    with capture_logs() as logs:
        async with engines(2) as (one, two):
            await one.vanish()
            await wait_for_servers([one.url, two.url], GENEROUS_S)
    assert logs == []  # there was no wait


async def test_without_a_healthy_server_every_one_is_named_at_the_deadline() -> None:
    with capture_logs() as logs:
        async with engines(2) as (one, two):
            await one.vanish()
            two.health = 503
            with pytest.raises(
                ServiceUnavailable,
                match=f"{one.url} is not healthy after 0.5 s; .*Connect call.*; "
                f".*{two.url} is not healthy after 0.5 s; .*503",
            ):
                await wait_for_servers([one.url, two.url], 0.5)
    assert [entry["url"] for entry in logs] == [one.url, two.url]


async def test_something_else_at_a_url_is_not_waited_for() -> None:
    async with engines(1) as (good,):
        with (
            stub_server({"GET /health": missing}) as other,
            pytest.raises(NotAnInferenceServer, match=f"{other.url} is not vllm-api-server"),
        ):
            await wait_for_servers([good.url, other.url], GENEROUS_S)


async def test_weights_that_are_written_in_place_have_one_server() -> None:
    without_bridge: dict[str, Route] = {
        "GET /health": lambda _: (200, {}),
        "GET /bridge/info": missing,
    }
    async with engines(2) as (shared, alone):
        shared.shares_weights = True
        await wait_for_servers([shared.url], GENEROUS_S)
        with stub_server(without_bridge) as other:
            await wait_for_servers([alone.url, other.url], GENEROUS_S)
        with pytest.raises(SharedWeightsHaveOneServer, match=f"weights of {shared.url} in place"):
            await wait_for_servers([alone.url, shared.url], GENEROUS_S)
