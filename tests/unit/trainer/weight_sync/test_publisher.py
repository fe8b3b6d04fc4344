"""Publications to several servers, over a real Redis; threads act as the servers."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from redis import Redis
from structlog.testing import capture_logs

from grpo_core.weights.servers import ServerState
from grpo_core.weights.version_log import TrainerReplaced, VersionLog
from grpo_core.weights.versions import Announcement, VersionKind
from grpo_trainer.errors import (
    GrpoError,
    LostServer,
    NoInferenceServer,
    NotPublished,
    WeightsRefused,
)
from grpo_trainer.weight_sync.base import Incidents
from grpo_trainer.weight_sync.servers import Publisher, ServedPublication, ServerWatch
from tests.support.wait import DEADLINE_S, wait_for
from tests.unit.trainer.server_stand_in import Reply, StandIn, depart, ignore, refuse

VERSION = Announcement(epoch=1, step=3, kind=VersionKind.FULL, digest="0" * 64, bytes=7)
SOURCES = ["http://trainer/weights"]
WAIT_S, PUBLISH_DEADLINE_S, RETURN_DEADLINE_S = 10.0, 600.0, 60.0


@dataclass
class Clock:
    """Time passes only in `sleep`, and there only if it may."""

    now: float = 0.0
    may_pass: Callable[[], bool] = lambda: True

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if self.may_pass():
            self.now += seconds


class Rig:
    """A run's servers and its trainer."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self.url, self.run_id = url, uuid.uuid4().hex[:8]
        self.clock = Clock()
        self.versions = stack.enter_context(VersionLog(url, self.run_id, DEADLINE_S))
        self.redis = stack.enter_context(Redis.from_url(url, decode_responses=True))
        self._stack = stack
        self.watch = ServerWatch(
            self.versions, RETURN_DEADLINE_S, clock=self.clock, sleep=self.clock.sleep
        )
        self.publisher = Publisher(self.watch, WAIT_S, PUBLISH_DEADLINE_S)

    def server(self, name: str, reply: Reply | None = None, **status: object) -> StandIn:
        return self._stack.enter_context(StandIn(self.url, self.run_id, name, reply, **status))

    def publish(self) -> ServedPublication:
        return self.publisher.publish(VERSION, SOURCES)

    def lose(self) -> None:
        """What a flush of Redis does to this run."""
        for key in self.redis.scan_iter(f"*{self.run_id}*weights*"):
            self.redis.delete(key)


@pytest.fixture
def rig(redis_url: str) -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(redis_url, stack)


def test_a_publication_waits_for_all_that_serve(rig: Rig) -> None:
    rig.clock.may_pass = lambda: False
    rig.server("a")
    rig.server("b", in_use="1-1", fetching="1-2", reply=ignore, state=ServerState.JOINING)
    found = rig.publish()
    assert [*found.serving] == ["a"]
    assert found.in_use == {"1-1", "1-2", "1-3"}
    assert (found.reach.servers, found.reach.bytes, found.reach.all_s) == (1, 7, 0.0)
    rig.server("c")
    assert [*rig.watch.await_serving()] == ["a", "c"]


def test_a_straggler_delays_a_publication_by_the_wait_only(rig: Rig) -> None:
    """The clock stands still until both others serve."""
    rig.server("a")
    rig.server("b")
    rig.server("slow", ignore)
    rig.clock.may_pass = lambda: (
        sum(one.version == VERSION.version for one in rig.versions.servers()) == 2
    )
    with capture_logs() as logs:
        found = rig.publish()
    assert [*found.serving] == ["a", "b"]
    assert WAIT_S <= rig.clock.now < WAIT_S + 0.5
    assert found.reach.all_s is None
    assert found.reach.first_s is not None
    assert found.reach.first_s < WAIT_S
    late = [event["servers"] for event in logs if event["event"] == "publication.late"]
    assert late == ["slow serving policy version (0, 0)"]
    assert rig.publisher.late == 1


def test_a_server_that_leaves_is_not_waited_for(rig: Rig) -> None:
    rig.clock.may_pass = lambda: False
    rig.server("a")
    rig.server("gone", depart)
    with capture_logs() as logs:
        assert [*rig.publish().serving] == ["a"]
    assert [event["server"] for event in logs if event["event"] == "server.left"] == ["gone"]
    assert rig.watch.incidents() == Incidents(left=1)
    assert rig.watch.incidents() == Incidents()


def test_a_refusal_by_all_ends_it_at_once_and_by_one_does_not(rig: Rig) -> None:
    rig.clock.may_pass = lambda: False
    rig.server("a", refuse)
    with pytest.raises(WeightsRefused, match=r"\(1, 3\): a: rank 64, at most 16"):
        rig.publish()
    rig.server("b")
    assert [*rig.publish().serving] == ["b"]


@pytest.mark.parametrize(
    ("reply", "error", "told"),
    [
        (ignore, NotPublished, r"\(1, 3\) is not served after 600 s \(a serving policy version"),
        (depart, LostServer, r"has served for 60 s \(none reports a status in Redis"),
    ],
)
def test_without_a_server_that_takes_it_the_trainer_ends(
    reply: Reply, error: type[GrpoError], told: str, rig: Rig
) -> None:
    server = rig.server("a", reply)
    rig.clock.may_pass = lambda: bool(server.seen)
    rig.clock.sleep, sleep = (lambda s: sleep(50 * s)), rig.clock.sleep  # type: ignore[method-assign]
    rig.watch.sleep = rig.clock.sleep
    with pytest.raises(error, match=told):
        rig.publish()


def test_a_failed_server_is_lost_with_the_reason_that_it_gives(rig: Rig) -> None:
    rig.server("a", state=ServerState.FAILED, reason="5 crashes in 60 s")
    rig.watch.sleep = lambda s: rig.clock.sleep(50 * s)
    with pytest.raises(LostServer, match="a failed: 5 crashes in 60 s"):
        rig.watch.look()


def test_servers_that_do_not_come_are_named_at_the_start(rig: Rig) -> None:
    rig.server("a")
    rig.watch.sleep = lambda s: rig.clock.sleep(50 * s)
    with pytest.raises(NoInferenceServer, match="nodes 3: after 60 s, 1 inference servers of run"):
        rig.watch.await_all(3)
    rig.server("b")
    assert [*rig.watch.await_all(2)] == ["a", "b"]


def test_an_announcement_that_redis_has_lost_is_repeated(rig: Rig) -> None:
    rig.clock.may_pass = lambda: False
    rig.server("a")
    rig.publish()
    rig.lose()
    rig.clock.now += 1.0
    with capture_logs() as logs:
        rig.watch.look()
    assert rig.versions.head() == VERSION
    assert "announcement.repeated" in [event["event"] for event in logs]
    assert rig.watch.incidents() == Incidents(repeated=1)


def test_one_that_is_lost_during_the_publication_is_repeated(rig: Rig) -> None:
    rig.clock.may_pass = lambda: False
    times = itertools.count()

    def lose_once(server: StandIn, announced: Announcement) -> None:
        if next(times) == 0:
            rig.lose()
            wait_for(lambda: rig.watch.repeated)
        server.adopt(announced)

    rig.server("a", lose_once)
    rig.publish()
    assert rig.versions.head() == VERSION


def test_a_trainer_that_was_replaced_ends(rig: Rig) -> None:
    rig.clock.may_pass = lambda: False
    rig.server("a")
    rig.publish()
    rig.versions.announce(Announcement(epoch=2, step=0, kind=VersionKind.BASE))
    rig.clock.now += 1.0
    with pytest.raises(TrainerReplaced, match=r"\(1, 3\) cannot be announced"):
        rig.watch.look()
