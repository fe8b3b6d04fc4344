"""Requests of the checks to one of several servers, which may leave meanwhile."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_core.errors import ServiceUnavailable
from grpo_trainer.weight_sync import probe
from grpo_trainer.weight_sync.base import POLL_S
from grpo_trainer.weight_sync.probe import ServerLeft, ServerProbe


class Watch:
    """Of one server, or of none. Each look lets the request be answered, and waits for that."""

    def __init__(self, *servers: str) -> None:
        self._servers = dict.fromkeys(servers, SimpleNamespace(serves=True))
        self.may_answer = threading.Event()
        self.unanswered = 0
        self.clock = lambda: 0.0

    def servers(self) -> dict[str, Any]:
        self.may_answer.set()
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and thread.name == "asked":
                thread.join()
        return self._servers


def answer_late(watch: Watch, error: Exception | None = None) -> str:
    """The answer of a server that answers after the first look at the servers has begun."""
    asked = ServerProbe("a", None, watch, patience_s=9.0)  # type: ignore[arg-type]

    def ask() -> str:
        threading.current_thread().name = "asked"
        watch.may_answer.wait()
        if error is not None:
            raise error
        return "answer"

    return asked.answer(ask)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "REPORT_EVERY_S", 0.01)


def test_an_answer_that_arrives_during_a_look_at_the_servers_counts() -> None:
    assert answer_late(Watch("a")) == "answer"


def test_an_error_that_arrives_then_is_that_of_the_request() -> None:
    for error in (ServiceUnavailable("away"), TimeoutError("of the request")):
        with pytest.raises(type(error), match=str(error)):
            answer_late(Watch("a"), error)


def test_a_server_that_left_is_not_waited_for() -> None:
    with pytest.raises(ServerLeft):
        answer_late(Watch("b"))


def test_a_server_that_restarts_is_not_waited_for_while_others_serve() -> None:
    now = [0.0]
    watch: Any = SimpleNamespace(
        clock=lambda: now[0],
        sleep=lambda seconds: now.__setitem__(0, now[0] + seconds),
        servers=lambda: {"a": SimpleNamespace(serves=False), "b": SimpleNamespace(serves=True)},
        await_serving=lambda: {"b"},
        return_deadline_s=300.0,
        unanswered=0,
    )
    with pytest.raises(ServerLeft):
        ServerProbe("a", None, watch, patience_s=9.0).sample([1], 1)  # type: ignore[arg-type]
    assert 9.0 <= now[0] < 9.0 + 2 * POLL_S
    assert watch.unanswered == 1
