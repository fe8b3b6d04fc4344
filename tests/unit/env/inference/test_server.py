"""Standings by hand, with a clock that the test moves. The event names what is logged."""

from __future__ import annotations

import httpx
import pytest
from structlog.testing import capture_logs

from grpo_core.clients.service import TransientAnswer
from grpo_core.errors import ServiceUnavailable
from grpo_env.inference import server
from grpo_env.inference.health import NotAnInferenceServer
from grpo_env.inference.server import Availability, Standing

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
        self.server = Availability("http://a", 120.0, self._count, lambda: self.now)
        self.probed(None)
        self.changes = 0

    def _count(self) -> None:
        self.changes += 1

    def probed(self, problem: Exception | None, took_s: float = 0.0) -> Standing:
        self.server.probed(problem, self.now - took_s)
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
    monkeypatch.setattr(server, "_FIRST_RECHECK_S", 0.2)
    monkeypatch.setattr(server, "_LAST_RECHECK_S", 5.0)
    one = Watched()
    one.probed(REFUSED)
    rechecks = []
    for one.now in (0.0, 20.0, 3600.0):
        rechecks.append(one.server.recheck_s)
    assert rechecks == [0.2, 2.0, 5.0]
