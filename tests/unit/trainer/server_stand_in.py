"""A thread that acts as the server's supervisor, over a real Redis."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from redis import Redis

from grpo_core.weights.supervisor import (
    Outcome,
    OutcomeState,
    SupervisorCommand,
    SupervisorPhase,
    SupervisorStatus,
    commands_key,
    outcome_key,
    status_key,
)
from tests.support.wait import wait_for

Reply = Callable[["StandIn", SupervisorCommand], None]


class StandIn:
    """Answers the n-th command with the n-th reply, and writes its status every 50 ms."""

    def __init__(self, url: str, run_id: str, replies: Iterable[Reply] = ()) -> None:
        self.redis: Redis = Redis.from_url(url, decode_responses=True, protocol=2)
        self.run_id = run_id
        self.seen: list[SupervisorCommand] = []
        self.says = SupervisorStatus(state=SupervisorPhase.SERVING, epoch=0, step=0)
        self.speaks = True
        self._replies = iter(replies)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def __enter__(self) -> StandIn:
        wait_for(lambda: self.redis.exists(status_key(self.run_id)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.redis.close()

    def becomes(self, **changes: Any) -> None:
        """Return once Redis has the new status."""
        self.says = self.says.model_copy(update=changes)
        key, expected = status_key(self.run_id), self.says.on_the_wire()
        del expected["time"]
        wait_for(lambda: self.redis.hgetall(key), lambda found: expected.items() <= found.items())

    def answer(self, command: SupervisorCommand, state: OutcomeState, **fields: str) -> None:
        written = Outcome(state=state, **fields).on_the_wire()
        self.redis.hset(outcome_key(self.run_id, command.id), mapping=written)

    def serve(self, command: SupervisorCommand) -> None:
        self.says = self.says.model_copy(
            update={"epoch": command.epoch, "step": command.step, "path": command.path}
        )

    def lose_commands(self) -> None:
        """Lose the newest data, like a Redis that crashed."""
        self.redis.delete(commands_key(self.run_id))

    def _work(self) -> None:
        place = "0"
        while not self._stop.wait(0.05):
            if self.speaks:
                status = self.says.model_copy(update={"time": time.time()}).on_the_wire()
                self.redis.hset(status_key(self.run_id), mapping=status)
            for _, entries in self.redis.xread({commands_key(self.run_id): place}) or []:
                for found, fields in entries:
                    place = found
                    self.seen.append(SupervisorCommand.from_wire(fields))
                    next(self._replies)(self, self.seen[-1])


def done(server: StandIn, command: SupervisorCommand) -> None:
    server.serve(command)
    server.answer(command, OutcomeState.ACCEPTED)
    server.answer(command, OutcomeState.DONE, in_use=json.dumps(["/weights/epoch_1_step_2"]))


def says(state: OutcomeState, reason: str) -> Reply:
    return lambda server, command: server.answer(command, state, reason=reason)


def silence(_server: StandIn, _command: SupervisorCommand) -> None:
    """A reply function that sends no answer."""
