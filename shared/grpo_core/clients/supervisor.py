"""Client of the supervisor: sends commands and reads outcomes and status in Redis.

`grpo_core.weights.supervisor_protocol` defines the records.
"""

from __future__ import annotations

from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError
from grpo_core.redis.connection import FAILURES, RedisConnection, words
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


class SupervisorClient(RedisConnection):
    """Retries every call while Redis is unreachable, until `deadline_s` has passed.

    Args:
        url: of Redis
        run_id: the run of the server; it may be set later

    Raises (every method):
        ServiceUnavailable: Redis did not answer in time.
        ProtocolViolation: a record in Redis is invalid.
    """

    def __init__(self, url: str, run_id: str, deadline_s: float) -> None:
        super().__init__(url, ATTEMPT_S, deadline_s)
        self.run_id = run_id

    def status(self) -> SupervisorStatus | None:
        """The supervisor's last status; None if it never wrote one."""
        fields = self.call("HGETALL", status_key(self.run_id))
        return SupervisorStatus.from_wire(fields) if fields else None

    def status_for_report(self) -> SupervisorStatus | None:
        """The same, but None if it is unreadable, so that a successful run does not fail."""
        try:
            return self.status()
        except GrpoError:
            return None

    def send(self, command: Command) -> None:
        """Add the command to the stream once; after a lost answer, check if it is there already.

        The supervisor would carry out a repeat too, and overwrite the first outcome.
        """
        key, fields = commands_key(self.run_id), words(command.on_the_wire())
        deadline = Deadline(self.deadline_s)
        while True:
            try:
                self.attempt("XADD", key, "MAXLEN", "~", COMMANDS_KEPT, "*", *fields)
                return
            except FAILURES as error:
                self.pause(deadline, error)
                if self.has(command):
                    return

    def has(self, command: Command) -> bool:
        """Whether the stream has the command. A crash of Redis may lose the last second."""
        return any(found.get("id") == command.id for found in self._commands())

    def outcome(self, command: Command) -> Outcome | None:
        """The answer to the command; None until the supervisor has read it."""
        fields = self.call("HGETALL", outcome_key(self.run_id, command.id))
        return Outcome.from_wire(fields) if fields else None

    def newest_epoch(self) -> int:
        """The highest epoch of all commands in the stream; 0 if it is empty.

        A trainer that was killed may have sent a command for a version that is not served yet.
        """
        epochs = [found.get("epoch", "") for found in self._commands()]
        return max((int(epoch) for epoch in epochs if epoch.isdecimal()), default=0)

    def _commands(self) -> list[dict[str, str]]:
        entries = self.call("XREVRANGE", commands_key(self.run_id), "+", "-")
        return [fields for _, fields in entries]
