"""A service that fails gives no score: neither a judge in a reward, nor what a tool asks."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import aiohttp
import httpx
import pytest
import requests

from grpo_env.failures import is_of_machine
from grpo_env.rollout.groups import FailureReason
from grpo_env.tasks import RolloutFailed, Row
from grpo_env.tasks.tools import answer_calls
from tests.support.http_stub import Answer, DropConnection, stub_server
from tests.unit.env.feeding import Rewarded, right_and_wrong
from tests.unit.env.rollout.rig import lost, sample

HANGS_S = 0.2


def closing(_body: dict[str, Any]) -> Answer:
    raise DropConnection


@pytest.fixture
def judge() -> Iterator[Callable[[str], str]]:
    """The address of a judge that fails in this way."""
    routes = {f"GET /{n}": lambda _, n=n: (int(n), {}) for n in ("500", "429", "404")}
    with (
        stub_server({**routes, "GET /closes": closing}) as server,
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.create_server(("127.0.0.1", 0)) as closed,
    ):
        others = {
            "hangs": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "refuses": f"http://127.0.0.1:{closed.getsockname()[1]}",
            "unknown": "http://no.such.host.invalid",
        }
        closed.close()
        yield lambda how: others.get(how, f"{server.url}/{how}")


def by_httpx(url: str) -> None:
    httpx.get(url, timeout=HANGS_S, trust_env=False).raise_for_status()


def by_requests(url: str) -> None:
    with requests.Session() as session:
        session.trust_env = False
        session.get(url, timeout=HANGS_S).raise_for_status()


def by_urllib(url: str) -> None:
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=HANGS_S)


def by_aiohttp(url: str) -> None:
    async def get() -> None:
        limit = aiohttp.ClientTimeout(HANGS_S)
        async with aiohttp.ClientSession(timeout=limit) as http, http.get(url) as answer:
            answer.raise_for_status()

    asyncio.run(get())


@pytest.mark.parametrize("ask", [by_httpx, by_requests, by_urllib, by_aiohttp])
def test_a_service_that_fails_is_told_from_a_wrong_request(ask: Any, judge: Any) -> None:
    def told(how: str) -> bool:
        try:
            ask(judge(how))
        except Exception as error:  # noqa: BLE001 - each library has its own
            return is_of_machine(error)
        raise AssertionError("it answered")

    failures = ("500", "429", "closes", "hangs", "refuses", "unknown")
    assert {how: told(how) for how in failures} == dict.fromkeys(failures, True)
    assert not told("404")


def test_what_a_tool_says_of_a_failure_and_a_program_that_ended_are_answers() -> None:
    """The tool's author has made a text for the model, or the program is the model's."""
    error = ValueError("no such page")
    error.__context__ = ConnectionError()
    assert not is_of_machine(error)
    error.__cause__ = ConnectionError()
    assert is_of_machine(error)
    assert not is_of_machine(BrokenPipeError())


@pytest.mark.parametrize("how", ["500", "closes", "hangs"])
async def test_a_judge_that_fails_gives_no_score(judge: Any, how: str) -> None:
    def reward(_answer: str, _row: Row) -> float:
        by_httpx(judge(how))
        return 0.0

    outcome, _ = await sample(right_and_wrong, Rewarded(reward))
    assert lost(outcome).reason is FailureReason.QUARANTINED_REWARD
    assert not outcome.grades


CALL = '<tool_call>{"name": "look_up", "arguments": {"how": "x"}}</tool_call>'


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (ConnectionRefusedError("no search"), True),
        (OSError(28, "No space left on device"), True),
        (RolloutFailed("as the tool says"), True),
        (FileNotFoundError(2, "No such file"), False),
        (TimeoutError("the program of the model"), False),
    ],
)
async def test_a_tool_that_the_machine_fails_is_no_answer_of_it(
    error: Exception, is_lost: bool
) -> None:
    def look_up(how: str) -> str:  # noqa: ARG001
        """Look up.

        Args:
            how: what
        """
        raise error

    expected = (
        pytest.raises(RolloutFailed, match="the tool look_up: ") if is_lost else nullcontext()
    )
    with expected:
        (message,) = await answer_calls(CALL, [look_up]) or ()
        assert message["content"] == f"error: {error}"
