"""Waits until servers are healthy; and standings by hand, with a clock that the test moves."""

from __future__ import annotations

import httpx
import pytest
from structlog.testing import capture_logs

from grpo_core.clients.retry import TransientAnswer
from grpo_core.errors import ServiceUnavailable
from grpo_env.inference import health
from grpo_env.inference.health import (
    NotAnInferenceServer,
    ServerStanding,
    SharedWeightsHaveOneServer,
    Standing,
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


REFUSED = httpx.ConnectError("refused")
NO_ROUTE = httpx.ConnectTimeout("no route")
SILENT = httpx.ReadTimeout("")
BROKEN = httpx.ReadError("reset")
NOT_NOW = TransientAnswer("503", 503, 0.0)
FAULT = ServiceUnavailable("500")
ANOTHER = NotAnInferenceServer("404")


class Watched:
    """A server that serves at 0 s and is gone after 120 s without serving."""

    def __init__(self) -> None:
        self.now = 0.0
        self.changes = 0
        self.server = ServerStanding("http://a", 120.0, self._count, lambda: self.now)
        self.probed(None)
        self.changes = 0

    def _count(self) -> None:
        self.changes += 1

    def probed(self, problem: Exception | None, took_s: float = 0.0) -> Standing:
        self.server.record_probe(problem, self.now - took_s)
        return self.server.standing

    def request(self, error: Exception | None) -> Standing:
        if error is None:
            self.server.request_answered()
        else:
            self.server.request_failed(error)
        return self.server.standing


@pytest.mark.parametrize("error", [SILENT, NOT_NOW, FAULT, BROKEN])
def test_an_unhealthy_server_is_away_and_serves_as_soon_as_it_is_healthy(error: Exception) -> None:
    one = Watched()
    with capture_logs() as logs:
        assert one.probed(error) is Standing.AWAY
        one.now = 119.9
        assert one.probed(error) is Standing.AWAY
        assert one.probed(None) is Standing.SERVING
        assert one.probed(None) is Standing.SERVING
    assert [entry["event"] for entry in logs] == ["server.unresponsive", "server.recovered"]
    assert logs[1]["away_s"] == 119.9
    assert one.changes == 2


@pytest.mark.parametrize("error", [REFUSED, NO_ROUTE])
@pytest.mark.parametrize("seen_by", ["probed", "request"])
def test_a_server_without_a_connection_is_gone_at_once(error: Exception, seen_by: str) -> None:
    one = Watched()
    with capture_logs() as logs:
        assert getattr(one, seen_by)(error) is Standing.GONE
        assert one.request(BROKEN) is Standing.GONE  # a request that was in flight
        assert one.probed(error) is Standing.GONE
        assert one.probed(NOT_NOW) is Standing.GONE  # it starts again
        assert one.probed(None) is Standing.SERVING
    assert [entry["event"] for entry in logs] == ["server.failed", "server.recovered"]


@pytest.mark.parametrize(
    ("error", "event"),
    [(BROKEN, "server.unresponsive"), (NOT_NOW, "server.unresponsive"), (FAULT, "server.failed")],
)
def test_a_healthy_server_whose_request_failed_is_on_trial(error: Exception, event: str) -> None:
    one = Watched()
    with capture_logs() as logs:
        assert one.request(error) is Standing.AWAY
        assert one.probed(None, took_s=1.0) is Standing.AWAY  # it began before the failure
        assert one.probed(None) is Standing.ON_TRIAL
        assert one.request(error) is Standing.AWAY
        assert one.probed(None) is Standing.ON_TRIAL
        assert one.request(None) is Standing.SERVING
    assert [entry["event"] for entry in logs] == [event, "server.recovered"]


def test_a_server_that_serves_nothing_for_too_long_is_gone() -> None:
    one = Watched()
    one.request(BROKEN)
    with capture_logs() as logs:
        one.now = 120.0
        assert one.probed(SILENT, took_s=5.0) is Standing.GONE
        assert one.probed(None) is Standing.SERVING
        assert one.probed(SILENT, took_s=5.0) is Standing.AWAY  # another outage
    assert [entry["event"] for entry in logs] == [
        *("server.failed", "server.recovered", "server.unresponsive")
    ]


def test_only_a_probe_that_saw_no_answer_at_all_is_silence() -> None:
    one = Watched()
    one.now = 10.0
    one.request(None)
    one.now = 12.0
    assert one.probed(SILENT, took_s=5.0) is Standing.SERVING
    assert one.probed(NOT_NOW, took_s=5.0) is Standing.AWAY
    one.probed(None)
    assert one.probed(SILENT, took_s=1.0) is Standing.AWAY


def test_something_else_in_the_server_s_place_is_no_restart() -> None:
    assert Watched().probed(ANOTHER) is Standing.GONE


def test_a_long_outage_is_probed_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_FIRST_RECHECK_S", 0.2)
    monkeypatch.setattr(health, "_LAST_RECHECK_S", 5.0)
    one = Watched()
    one.probed(REFUSED)
    rechecks = []
    for one.now in (0.0, 20.0, 3600.0):
        rechecks.append(one.server.recheck_s)
    assert rechecks == [0.2, 2.0, 5.0]
