"""Commands to the inference server's supervisor, and what it says: the trainer's side of
`grpo_core.weights.supervisor_protocol`. The only module of the trainer that speaks Redis."""

from __future__ import annotations

import time
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from grpo_core.errors import ProtocolViolation, ServiceUnavailable
from grpo_core.process.closing import ClosesOnExit
from grpo_core.redis.url import without_password
from grpo_core.weights.supervisor_protocol import (
    COMMANDS_KEPT,
    Command,
    Outcome,
    SupervisorStatus,
    commands_key,
    outcome_key,
    status_key,
)

ATTEMPT_S = 5.0
RETRY_S = 0.2
_FAILURES = (RedisError, OSError)


class SupervisorClient(ClosesOnExit):
    """Every call is repeated while Redis is away, until `deadline_s` has passed.

    Args:
        url: of Redis
        run_id: whose server

    Raises (every method):
        ServiceUnavailable: Redis did not answer in time.
        ProtocolViolation: what is there breaks the protocol.
    """

    def __init__(self, url: str, run_id: str, deadline_s: float) -> None:
        self.run_id = run_id
        self.deadline_s = deadline_s
        self._where = without_password(url)
        self._redis: Redis = Redis.from_url(
            url,
            socket_connect_timeout=ATTEMPT_S,
            socket_timeout=ATTEMPT_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            decode_responses=True,
        )

    def close(self) -> None:
        self._redis.close()

    def status(self) -> SupervisorStatus | None:
        """What the supervisor said last; None where it never did."""
        fields = self._call("HGETALL", status_key(self.run_id))
        return SupervisorStatus.from_wire(_hash(fields)) if fields else None

    def send(self, command: Command) -> None:
        """Ask for it once: where an answer of Redis is lost, the stream says whether it is there.

        A repeat under the same id would be answered too, and take the place of the first answer.
        """
        words = [word for field in command.on_the_wire().items() for word in field]
        key = commands_key(self.run_id)
        give_up_at = time.monotonic() + self.deadline_s
        while True:
            try:
                self._attempt("XADD", key, "MAXLEN", "~", COMMANDS_KEPT, "*", *words)
                return
            except _FAILURES as error:
                self._pause_unless_late(give_up_at, error)
                if self.has(command):
                    return

    def has(self, command: Command) -> bool:
        """Is it in the stream? One that Redis lost with its last second will not be answered."""
        return any(found.get("id") == command.id for found in self._commands())

    def outcome(self, command: Command) -> Outcome | None:
        """None until the supervisor has seen it."""
        fields = self._call("HGETALL", outcome_key(self.run_id, command.id))
        return Outcome.from_wire(_hash(fields)) if fields else None

    def newest_epoch(self) -> int:
        """Of all commands that are remembered; 0 where there is none. A trainer that was killed may
        have asked for versions that nobody serves yet."""
        epochs = [found.get("epoch", "") for found in self._commands()]
        return max((int(epoch) for epoch in epochs if epoch.isdecimal()), default=0)

    def _commands(self) -> list[dict[str, str]]:
        entries = self._call("XREVRANGE", commands_key(self.run_id), "+", "-")
        return [_hash(fields) for _, fields in entries]

    def _call(self, *command: Any) -> Any:
        give_up_at = time.monotonic() + self.deadline_s
        while True:
            try:
                return self._attempt(*command)
            except _FAILURES as error:
                self._pause_unless_late(give_up_at, error)

    def _attempt(self, *command: Any) -> Any:
        # redis-py leaves this method without types
        return self._redis.execute_command(*command)  # type: ignore[no-untyped-call]

    def _pause_unless_late(self, give_up_at: float, error: Exception) -> None:
        if time.monotonic() >= give_up_at:
            raise ServiceUnavailable(
                f"Redis not usable at {self._where} for {self.deadline_s:g} s "
                f"({str(error) or type(error).__name__}); check that it runs and that --redis-url "
                "is that of the inference server"
            ) from error
        time.sleep(RETRY_S)


def _hash(fields: Any) -> dict[str, str]:
    """redis-py parses some answers into dictionaries and leaves others as flat lists."""
    if isinstance(fields, dict):
        return fields
    if not isinstance(fields, list) or len(fields) % 2:
        raise ProtocolViolation(f"Redis answered {fields!r}, which is no hash")
    return dict(zip(fields[::2], fields[1::2], strict=True))
