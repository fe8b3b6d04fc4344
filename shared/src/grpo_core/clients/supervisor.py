"""Client of the inference server's supervisor: commands to it, and what it reports, in Redis. The
protocol: `grpo_core.weights.supervisor_protocol`.
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
    """Every call is repeated while Redis is away, until `deadline_s` has passed.

    Args:
        url: of Redis
        run_id: whose server

    Raises (every method):
        ServiceUnavailable: Redis did not answer in time.
        ProtocolViolation: what is there breaks the protocol.
    """

    def __init__(self, url: str, run_id: str, deadline_s: float) -> None:
        super().__init__(url, ATTEMPT_S, deadline_s)
        self.run_id = run_id

    def status(self) -> SupervisorStatus | None:
        """What the supervisor said last; None where it never did."""
        fields = self.call("HGETALL", status_key(self.run_id))
        return SupervisorStatus.from_wire(fields) if fields else None

    def status_for_report(self) -> SupervisorStatus | None:
        """The same; None also where it cannot be read: a run that went well must not end badly."""
        try:
            return self.status()
        except GrpoError:
            return None

    def send(self, command: Command) -> None:
        """Ask for it once: where an answer of Redis is lost, the stream says whether it is there.

        A repeat under the same id would be answered too, and take the place of the first answer.
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
        """Is it in the stream? One that Redis lost with its last second will not be answered."""
        return any(found.get("id") == command.id for found in self._commands())

    def outcome(self, command: Command) -> Outcome | None:
        """None until the supervisor has seen it."""
        fields = self.call("HGETALL", outcome_key(self.run_id, command.id))
        return Outcome.from_wire(fields) if fields else None

    def newest_epoch(self) -> int:
        """Of all commands that are remembered; 0 where there is none. A trainer that was killed may
        have asked for versions that nobody serves yet."""
        epochs = [found.get("epoch", "") for found in self._commands()]
        return max((int(epoch) for epoch in epochs if epoch.isdecimal()), default=0)

    def _commands(self) -> list[dict[str, str]]:
        entries = self.call("XREVRANGE", commands_key(self.run_id), "+", "-")
        return [fields for _, fields in entries]
