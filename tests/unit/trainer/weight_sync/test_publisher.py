"""The trainer's commands to the supervisor, over a real Redis; a thread acts as the supervisor."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from grpo_core.errors import ServiceUnavailable
from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_core.weights.supervisor import (
    Action,
    OutcomeState,
    SupervisorClient,
    SupervisorCommand,
    SupervisorPhase,
    commands_key,
)
from grpo_core.wire.policy_version import PolicyVersion
from grpo_runs.process.ports import free_port
from grpo_trainer.errors import GrpoError, LostServer, NotPublished, WeightsRefused
from grpo_trainer.weight_sync import supervisor as supervisor_commands
from grpo_trainer.weight_sync.supervisor import Publisher, ServerMonitor
from tests.unit.trainer.supervisor_stand_in import Reply, StandIn, done, says, silence

FILES = WeightRef(
    version=PolicyVersion(1, 3),
    kind=WeightKind.ADAPTER,
    path=Path("/weights/epoch_1_step_3"),
    digest="0" * 64,
)
FAILED = says(OutcomeState.FAILED, "no memory")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_commands, "FIRST_RETRY_S", 0.05)


@dataclass
class Rig:
    """A client of Redis, and a stand-in supervisor at the other end."""

    url: str
    link: SupervisorClient

    def supervisor(self, *replies: Reply) -> StandIn:
        return StandIn(self.url, self.link.run_id, replies)

    def serve(self, deadline_s: float = 60.0) -> frozenset[Path]:
        monitor = ServerMonitor(self.link, return_deadline_s=60.0)
        return Publisher(self.link, monitor, Action.LOAD_ADAPTER, deadline_s).publish(FILES)


@pytest.fixture
def rig(redis_url: str) -> Iterator[Rig]:
    with SupervisorClient(redis_url, uuid.uuid4().hex[:8], deadline_s=60.0) as link:
        yield Rig(redis_url, link)


def test_a_command_holds_everything_and_its_answer_what_must_stay(rig: Rig) -> None:
    with rig.supervisor(done) as server:
        assert rig.serve() == {Path("/weights/epoch_1_step_2")}
    (command,) = server.seen
    assert (command.action, command.version) == (Action.LOAD_ADAPTER, (1, 3))
    assert (command.path, command.sha256) == ("/weights/epoch_1_step_3", "0" * 64)
    assert rig.link.newest_epoch() == 1


def test_busy_and_failed_are_retried_under_another_id(rig: Rig) -> None:
    replies = [says(OutcomeState.BUSY, "another"), FAILED, done]
    with rig.supervisor(*replies) as server:
        rig.serve()
    assert len({command.id for command in server.seen}) == 3


@pytest.mark.parametrize(
    ("reply", "error", "told"),
    [
        (says(OutcomeState.REFUSED, "rank 64, at most 16"), WeightsRefused, "rank 64, at most 16"),
        (FAILED, NotPublished, r"\(1, 3\) is not served after 60 s \(failed: no memory"),
    ],
)
def test_a_refusal_or_a_failure_without_time_for_a_retry_ends_it(
    reply: Reply,
    error: type[GrpoError],
    told: str,
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_commands, "FIRST_RETRY_S", 60.0)
    with rig.supervisor(reply) as server, pytest.raises(error, match=told):
        rig.serve()
    assert len(server.seen) == 1


def test_a_command_without_an_answer_is_named_at_the_deadline(rig: Rig) -> None:
    with rig.supervisor(silence), pytest.raises(NotPublished, match="not accepted"):
        rig.serve(deadline_s=0.5)


def test_served_weights_count_although_the_answer_was_lost(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repeated command is refused, because its version is no longer new."""
    monkeypatch.setattr(supervisor_commands, "LOST_AFTER_S", 0.0)

    def carry_out_and_forget(server: StandIn, command: SupervisorCommand) -> None:
        server.serve(command)
        server.lose_commands()

    replies = [carry_out_and_forget, says(OutcomeState.REFUSED, "not a new version")]
    with rig.supervisor(*replies):
        assert rig.serve() == frozenset()


def test_a_supervisor_that_falls_silent_is_lost(rig: Rig) -> None:
    def fall_silent(server: StandIn, _command: SupervisorCommand) -> None:
        server.speaks = False

    a_second_per_reading = map(float, itertools.count()).__next__
    monitor = ServerMonitor(rig.link, 20.0, a_second_per_reading)
    told = r"down for 20 s \(its supervisor reports no status in Redis"
    with rig.supervisor(fall_silent), pytest.raises(LostServer, match=told):
        Publisher(rig.link, monitor, Action.LOAD_ADAPTER, deadline_s=120.0).publish(FILES)


def test_a_failed_server_is_lost_with_the_reason_that_it_gives(rig: Rig) -> None:
    with rig.supervisor() as server:
        server.becomes(state=SupervisorPhase.FAILED, reason="5 crashes in 60 s")
        with pytest.raises(LostServer, match="failed: 5 crashes in 60 s"):
            ServerMonitor(rig.link, 0.0, lambda: 100.0).look()


class BreaksOnce(SupervisorClient):
    """The connection breaks at the first command, before or after Redis executes it."""

    carries_out = is_whole = False

    def attempt(self, *command: Any) -> Any:
        if self.is_whole or command[0] != "XADD":
            return super().attempt(*command)
        self.is_whole = True
        if self.carries_out:
            super().attempt(*command)
        raise RedisConnectionError("broken")


@pytest.mark.parametrize("carries_out", [False, True])
def test_a_command_is_sent_once_over_a_connection_that_breaks(
    carries_out: bool, redis_url: str
) -> None:
    weights = {"path": "/weights/x", "sha256": "0" * 64}
    command = SupervisorCommand(id="1", action=Action.LOAD_ADAPTER, epoch=1, step=1, **weights)
    with BreaksOnce(redis_url, uuid.uuid4().hex[:8], deadline_s=60.0) as link:
        link.carries_out = carries_out
        link.send(command)
        assert link.is_whole
        with Redis.from_url(redis_url, decode_responses=True) as plain:
            entries = plain.xrange(commands_key(link.run_id))
    assert [fields["id"] for _, fields in entries] == ["1"]


def test_a_redis_that_stays_away_is_named_without_its_password() -> None:
    url = f"redis://:secret@127.0.0.1:{free_port()}/0"
    told = r"Redis at redis://127\.0\.0\.1"
    with (
        SupervisorClient(url, "run", deadline_s=0.05) as link,
        pytest.raises(ServiceUnavailable, match=told) as raised,
    ):
        link.status()
    assert "secret" not in str(raised.value)
