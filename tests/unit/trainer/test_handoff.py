"""The trainer's side of the hand-off, on a real Redis, against a supervisor played by a thread."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from grpo_core.errors import ServiceUnavailable
from grpo_core.handoff import (
    Action,
    Command,
    OutcomeState,
    ServerStatus,
    SupervisorState,
    commands_key,
)
from grpo_core.wire import PolicyVersion
from grpo_local.ports import free_port
from grpo_local.redis_server import bundled_redis, start_redis
from grpo_trainer.errors import LostServer, NotPublished, WeightsRefused
from grpo_trainer.weight_sync import handoff, supervisor_watch
from grpo_trainer.weight_sync.handoff import Handoff, WeightFiles
from grpo_trainer.weight_sync.handoff_link import HandoffLink
from grpo_trainer.weight_sync.supervisor_watch import SupervisorWatch
from tests.support.process_table import eventually
from tests.unit.trainer.hand_off_stand_in import StandIn, done, says, silence

AOF = "appendonly.aof"
"""Of the bundled Redis, 6.2."""
FILES = WeightFiles(PolicyVersion(1, 3), Path("/weights/epoch_1_step_3"), "0" * 64)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "FIRST_RETRY_S", 0.05)


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex[:8]


@pytest.fixture
def link(redis_url: str, run_id: str) -> Iterator[HandoffLink]:
    with HandoffLink(redis_url, run_id, deadline_s=60.0) as opened:
        yield opened


def asking(link: HandoffLink, deadline_s: float = 60.0, return_s: float = 60.0) -> Handoff:
    watch = SupervisorWatch(link, return_deadline_s=return_s)
    return Handoff(link, watch, Action.LOAD_ADAPTER, deadline_s)


def test_a_command_says_everything_and_its_answer_what_must_stay(
    redis_url: str, run_id: str, link: HandoffLink
) -> None:
    with StandIn(redis_url, run_id, [done]) as server:
        assert asking(link).serve(FILES) == {Path("/weights/epoch_1_step_2")}
    (command,) = server.seen
    assert (command.action, command.version) == (Action.LOAD_ADAPTER, (1, 3))
    assert (command.path, command.sha256) == ("/weights/epoch_1_step_3", "0" * 64)
    assert link.newest_epoch() == 1


def test_busy_and_failed_are_asked_again_under_another_id(
    redis_url: str, run_id: str, link: HandoffLink
) -> None:
    replies = [says(OutcomeState.BUSY, "another"), says(OutcomeState.FAILED, "no memory"), done]
    with StandIn(redis_url, run_id, replies) as server:
        asking(link).serve(FILES)
    assert len({command.id for command in server.seen}) == 3


def test_a_refusal_ends_it_at_once_with_the_reason(
    redis_url: str, run_id: str, link: HandoffLink
) -> None:
    replies = [says(OutcomeState.REFUSED, "rank 64, at most 16")]
    with (
        StandIn(redis_url, run_id, replies) as server,
        pytest.raises(WeightsRefused, match="rank 64, at most 16"),
    ):
        asking(link).serve(FILES)
    assert len(server.seen) == 1


def test_a_failure_is_named_where_no_time_is_left_to_ask_again(
    redis_url: str, run_id: str, link: HandoffLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff, "FIRST_RETRY_S", 60.0)
    replies = [says(OutcomeState.FAILED, "no memory")] * 50
    with (
        StandIn(redis_url, run_id, replies) as server,
        pytest.raises(NotPublished, match=r"\(1, 3\) is not served after 60 s \(failed: no memory"),
    ):
        asking(link).serve(FILES)
    assert len(server.seen) == 1


def test_a_failure_that_stays_ends_at_the_deadline(
    redis_url: str, run_id: str, link: HandoffLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked again after 2 s, it has nearly 4 s for its last answer, which may come too late: there
    is no third time."""
    monkeypatch.setattr(handoff, "FIRST_RETRY_S", 2.0)
    replies = [says(OutcomeState.FAILED, "no memory")] * 50
    last = "failed: no memory|the command was"
    with (
        StandIn(redis_url, run_id, replies) as server,
        pytest.raises(NotPublished, match=rf"\(1, 3\) is not served after 6 s \(({last})"),
    ):
        asking(link, deadline_s=6.0).serve(FILES)
    assert len(server.seen) <= 2


def test_a_command_without_an_answer_is_named_at_the_deadline(
    redis_url: str, run_id: str, link: HandoffLink
) -> None:
    with StandIn(redis_url, run_id, [silence]), pytest.raises(NotPublished, match="not seen"):
        asking(link, deadline_s=0.5).serve(FILES)


def test_a_command_that_redis_lost_is_sent_again(
    redis_url: str, run_id: str, link: HandoffLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff, "LOST_AFTER_S", 0.3)

    def forget(server: StandIn, _command: Command) -> None:
        server.redis.delete(commands_key(server.run_id))

    with StandIn(redis_url, run_id, [forget, done]) as server:
        asking(link).serve(FILES)
    assert len(server.seen) == 2


def test_what_is_served_counts_where_its_answer_was_lost(
    redis_url: str, run_id: str, link: HandoffLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repeat is refused, because the version is not a new one any more."""
    monkeypatch.setattr(handoff, "LOST_AFTER_S", 0.3)

    def carry_out_and_forget(server: StandIn, command: Command) -> None:
        server.serve(command)
        server.redis.delete(commands_key(server.run_id))

    replies = [carry_out_and_forget, says(OutcomeState.REFUSED, "not a new version")]
    with StandIn(redis_url, run_id, replies):
        assert asking(link).serve(FILES) == frozenset()


def test_the_same_version_from_another_directory_does_not_count(
    redis_url: str, run_id: str, link: HandoffLink
) -> None:
    def elsewhere(server: StandIn, command: Command) -> None:
        server.serve(command, path="/weights/of_another_run")
        server.answer(command, OutcomeState.REFUSED, reason="taken")

    with StandIn(redis_url, run_id, [elsewhere]), pytest.raises(WeightsRefused, match="taken"):
        asking(link).serve(FILES)


def test_a_supervisor_that_falls_silent_is_lost(
    redis_url: str, run_id: str, link: HandoffLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_watch, "STATUS_STALE_S", 0.5)

    def fall_silent(server: StandIn, _command: Command) -> None:
        server.speaks = False

    with (
        StandIn(redis_url, run_id, [fall_silent]),
        pytest.raises(LostServer, match="says nothing in Redis"),
    ):
        asking(link, return_s=0.3).serve(FILES)


def test_a_failed_server_is_lost_with_the_reason_it_gives(
    redis_url: str, run_id: str, link: HandoffLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_watch, "STATUS_EVERY_S", 300.0)
    watch = SupervisorWatch(link, return_deadline_s=0.4)
    with StandIn(redis_url, run_id, []) as server:
        watch.look()
        server.becomes(state=SupervisorState.FAILED, reason="5 crashes in 60 s")
        watch.look()  # asked a moment ago
        with pytest.raises(LostServer, match="failed: 5 crashes in 60 s"):
            watch.await_serving()


def test_a_server_that_comes_back_in_time_is_waited_for(
    redis_url: str, run_id: str, link: HandoffLink
) -> None:
    watch = SupervisorWatch(link, return_deadline_s=60.0)
    with StandIn(redis_url, run_id, []) as server:
        server.becomes(state=SupervisorState.RESTARTING)
        threading.Timer(
            0.5, lambda: setattr(server, "says", ServerStatus(state="serving", epoch=4, step=2))
        ).start()
        assert watch.await_serving().version == (4, 2)


def test_nobody_ever_said_anything(link: HandoffLink) -> None:
    with pytest.raises(LostServer, match="says nothing in Redis"):
        SupervisorWatch(link, return_deadline_s=0.3).await_serving()


def test_a_redis_that_restarts_is_survived(tmp_path: Path, run_id: str) -> None:
    port = free_port()
    server = start_redis(port, tmp_path, bundled_redis())
    with HandoffLink(f"redis://127.0.0.1:{port}/0", run_id, deadline_s=60.0) as link:
        first, second = asking_command(), asking_command()
        link.send(first)
        assert eventually(lambda: first.id.encode() in (tmp_path / AOF).read_bytes())
        server.kill()
        sending = threading.Thread(target=link.send, args=(second,))
        sending.start()
        time.sleep(0.5)
        server = start_redis(port, tmp_path, bundled_redis())
        sending.join()
        try:
            assert link.has(first)
            with Redis(port=port, decode_responses=True) as plain:
                entries = plain.xrange(commands_key(run_id))
            assert [fields["id"] for _, fields in entries] == [first.id, second.id]
        finally:
            server.kill()


class LosesAnAnswer(HandoffLink):
    """The first command that it adds is carried out, and the connection breaks behind it."""

    has_lost = False

    def _attempt(self, *command: Any) -> Any:
        answer = super()._attempt(*command)
        if command[0] == "XADD" and not self.has_lost:
            self.has_lost = True
            raise RedisConnectionError("broken")
        return answer


def test_a_command_whose_receipt_was_lost_is_not_sent_twice(redis_url: str, run_id: str) -> None:
    with LosesAnAnswer(redis_url, run_id, deadline_s=60.0) as link:
        link.send(asking_command())
        assert link.has_lost
    with Redis.from_url(redis_url) as plain:
        assert plain.xlen(commands_key(run_id)) == 1


def test_a_redis_that_stays_away_is_named_without_its_password(run_id: str) -> None:
    url = f"redis://:secret@127.0.0.1:{free_port()}/0"
    with (
        HandoffLink(url, run_id, deadline_s=0.3) as link,
        pytest.raises(
            ServiceUnavailable, match=r"Redis not usable at redis://127\.0\.0\.1"
        ) as told,
    ):
        link.status()
    assert "secret" not in str(told.value)


def asking_command() -> Command:
    return Command(
        id=uuid.uuid4().hex,
        action=Action.LOAD_ADAPTER,
        epoch=1,
        step=1,
        path="/weights/x",
        sha256="0" * 64,
    )
