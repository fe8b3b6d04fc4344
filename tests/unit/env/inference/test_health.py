"""Waits until servers are healthy; and standings by hand, with a clock that the test moves."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from grpo_core.clients.service import TransientAnswer
from grpo_core.errors import OtherProtocol, ServiceUnavailable
from grpo_core.protocol import PROTOCOL_HEADER
from grpo_core.weights.model_files import PROBE_TEXT, token_ids
from grpo_env.inference import health
from grpo_env.inference.health import (
    HealthClient,
    NotAnInferenceServer,
    PoolState,
    ServerStanding,
    ServerTokenizerDiffers,
    SharedWeightsHaveOneServer,
)
from grpo_env.inference.places import Place
from grpo_env.inference.pool import InferencePool
from grpo_env.inference.waiting import wait_for_servers
from grpo_env.rollout.chat_template import load_template
from tests.support.canned import generate_answer
from tests.support.http_stub import Route, stub_server
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
                match=f"{one.url} is not healthy after 0.5 s: .*Connect call.*; "
                f".*{two.url} is not healthy after 0.5 s: .*503",
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


async def test_a_server_of_another_release_is_not_taken_for_one_without_a_version() -> None:
    header = {PROTOCOL_HEADER[0]: "999, grpo 7.8.9"}
    with stub_server({"GET /bridge/info": lambda _: (200, {}, header)}) as other:
        async with HealthClient(Place(other.url)) as client:
            with pytest.raises(OtherProtocol):
                await client.served_version()


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


@pytest.mark.parametrize("is_same", [True, False])
async def test_a_server_with_another_tokenizer_is_refused_with_both_lists(
    is_same: bool, tokenizer_dir: Path
) -> None:
    ours = load_template(str(tokenizer_dir)).tokenizer
    own = token_ids(ours, PROBE_TEXT)
    served = own if is_same else [*own[:3], *own[4:]]
    routes: dict[str, Route] = {
        "GET /health": lambda _: (200, {}),
        "POST /tokenize": lambda _: (200, {"tokens": served}),
        "POST /generate": lambda _: (200, generate_answer(["7"])),
    }
    with stub_server(routes) as server:
        async with InferencePool([server.url], GENEROUS_S, 8, tokenizer=ours) as pool:
            if is_same:
                assert (await pool.generate([1], max_tokens=1)).text == ["7"]
                assert await pool.servers[0].health.problem() is None
            else:
                with pytest.raises(ServerTokenizerDiffers) as refused:
                    await pool.generate([1], max_tokens=1)
                assert all(str(ids) in str(refused.value) for ids in (own, served))
        asked = server.bodies("POST /tokenize")
    assert asked == [{"prompt": PROBE_TEXT, "add_special_tokens": False}]


REFUSED = httpx.ConnectError("refused")
NO_ROUTE = httpx.ConnectTimeout("no route")
SILENT = httpx.ReadTimeout("")
BROKEN = httpx.ReadError("reset")
NOT_NOW = TransientAnswer("503", 503, 0.0)
FAULT = ServiceUnavailable("500")
ANOTHER = NotAnInferenceServer("404")


SERVING, ON_TRIAL, AWAY, GONE = (
    PoolState.SERVING,
    PoolState.ON_TRIAL,
    PoolState.AWAY,
    PoolState.GONE,
)
UNRESPONSIVE, FAILED, RECOVERED = "server.unresponsive", "server.failed", "server.recovered"


class Watched(ServerStanding):
    """A server that serves at 0 s and is gone after 120 s without serving."""

    def __init__(self) -> None:
        self.now, self.changes = 0.0, 0
        super().__init__("http://a", 120.0, self._count, lambda: self.now)
        self.record_probe(None, 0.0)
        self.changes = 0

    def _count(self) -> None:
        self.changes += 1

    def probed(self, problem: Exception | None, took_s: float = 0.0) -> PoolState:
        self.record_probe(problem, self.now - took_s)
        return self.standing

    def asked(self, error: Exception | None) -> PoolState:
        if error is None:
            self.request_answered()
        else:
            self.request_failed(error)
        return self.standing


@pytest.mark.parametrize("error", [SILENT, NOT_NOW, FAULT, BROKEN])
def test_an_unhealthy_server_is_away_and_serves_as_soon_as_it_is_healthy(error: Exception) -> None:
    one = Watched()
    with capture_logs() as logs:
        assert one.probed(error) is AWAY
        one.now = 119.9
        found = [one.probed(error), one.probed(None), one.probed(None)]
    assert (found, one.changes) == ([AWAY, SERVING, SERVING], 2)
    assert [entry["event"] for entry in logs] == [UNRESPONSIVE, RECOVERED]
    assert logs[1]["away_s"] == 119.9


@pytest.mark.parametrize("error", [REFUSED, NO_ROUTE])
@pytest.mark.parametrize("seen_by", ["probed", "asked"])
def test_a_server_without_a_connection_is_gone_at_once(error: Exception, seen_by: str) -> None:
    assert Watched().probed(ANOTHER) is GONE  # something else in its place is no restart
    one = Watched()
    with capture_logs() as logs:
        # A request was in flight; then the server starts again.
        found = [getattr(one, seen_by)(error), one.asked(BROKEN), one.probed(error)]
        assert [*found, one.probed(NOT_NOW), one.probed(None)] == [*[GONE] * 4, SERVING]
    assert [entry["event"] for entry in logs] == [FAILED, RECOVERED]


@pytest.mark.parametrize(
    ("error", "event"), [(BROKEN, UNRESPONSIVE), (NOT_NOW, UNRESPONSIVE), (FAULT, FAILED)]
)
def test_a_healthy_server_whose_request_failed_is_on_trial(error: Exception, event: str) -> None:
    one = Watched()
    with capture_logs() as logs:
        assert one.asked(error) is AWAY
        assert one.probed(None, took_s=1.0) is AWAY  # it began before the failure
        found = [one.probed(None), one.asked(error), one.probed(None), one.asked(None)]
        assert found == [ON_TRIAL, AWAY, ON_TRIAL, SERVING]
    assert [entry["event"] for entry in logs] == [event, RECOVERED]


def test_a_server_that_serves_nothing_for_too_long_is_gone() -> None:
    one = Watched()
    one.asked(BROKEN)
    with capture_logs() as logs:
        one.now = 120.0
        found = [one.probed(SILENT, took_s=5.0), one.probed(None)]
        assert [*found, one.probed(SILENT, took_s=5.0)] == [GONE, SERVING, AWAY]  # another outage
    assert [entry["event"] for entry in logs] == [FAILED, RECOVERED, UNRESPONSIVE]


def test_only_a_probe_that_saw_no_answer_at_all_is_silence() -> None:
    one = Watched()
    one.now = 10.0
    one.asked(None)
    one.now = 12.0
    found = [one.probed(SILENT, took_s=5.0), one.probed(NOT_NOW, took_s=5.0), one.probed(None)]
    assert [*found, one.probed(SILENT, took_s=1.0)] == [SERVING, AWAY, SERVING, AWAY]


def test_a_long_outage_is_probed_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_FIRST_RECHECK_S", 0.2)
    monkeypatch.setattr(health, "_LAST_RECHECK_S", 5.0)
    one = Watched()
    one.probed(REFUSED)
    rechecks = []
    for one.now in (0.0, 20.0, 3600.0):
        rechecks.append(one.recheck_s)
    assert rechecks == [0.2, 2.0, 5.0]
