"""Reads the trainer's commands from Redis, and writes their outcomes and the supervisor's status.

`grpo_core.weights.supervisor_protocol` defines the protocol. The record of the served weights is in
`grpo_vllm.weights.served_store`; no other module of the supervisor uses Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import structlog

from grpo_core.errors import ProtocolViolation
from grpo_core.redis.connection import FAILURES, AsyncRedisConnection, words
from grpo_core.redis.keys import run_prefix
from grpo_core.weights.supervisor_protocol import (
    OUTCOME_KEPT_S,
    Command,
    Outcome,
    OutcomeState,
    SupervisorStatus,
    commands_key,
    outcome_key,
    status_key,
)

log = structlog.get_logger()

BLOCK_MS = 1000
TIMEOUT_S = 5.0
_READ_AT_MOST = 100


class ControlPlane:
    """The source of commands. This one is for servers without Redis: it never delivers any."""

    async def commands(self) -> AsyncIterator[list[Command]]:
        """Yields the commands since the previous list, oldest first; never an empty list."""
        await asyncio.Event().wait()
        yield []

    async def answer(self, command: Command, outcome: Outcome) -> None:
        """Send the outcome to the sender. Writing is repeated until Redis has it."""

    async def report(self, status: SupervisorStatus) -> None:
        """Replace the status. Never raises."""


class CommandStream(ControlPlane, AsyncRedisConnection):
    """Commands in the Redis stream of the run `run_id`."""

    def __init__(self, url: str, run_id: str) -> None:
        super().__init__(url, TIMEOUT_S)
        self._run_id = run_id
        self._cursor_key = run_prefix(run_id) + "server:cursor"
        self._places: dict[str, str] = {}

    async def commands(self) -> AsyncIterator[list[Command]]:
        """Starts after the newest answered command, so a restarted supervisor handles the commands
        that its predecessor left unanswered. Invalid entries are logged and skipped.
        """
        at = await self.call("GET", self._cursor_key) or "0"
        while True:
            answer = await self.call(
                *("XREAD", "COUNT", _READ_AT_MOST, "BLOCK", BLOCK_MS, "STREAMS"),
                *(commands_key(self._run_id), at),
            )
            found = []
            for place, fields in _entries(answer):
                at = place
                try:
                    command = Command.from_wire(fields)
                except ProtocolViolation as error:
                    log.warning("command.invalid", stream_id=place, reason=str(error))
                    continue
                if not await self._is_answered(command):
                    self._places[command.id] = place
                    found.append(command)
            if found:
                yield found

    async def answer(self, command: Command, outcome: Outcome) -> None:
        key = outcome_key(self._run_id, command.id)
        await self.call("HSET", key, *words(outcome.on_the_wire()))
        await self.call("EXPIRE", key, OUTCOME_KEPT_S)
        if outcome.state is not OutcomeState.ACCEPTED:
            place = self._places.pop(command.id, None)
            if place is not None and not self._places_before(place):
                await self.call("SET", self._cursor_key, place)

    async def report(self, status: SupervisorStatus) -> None:
        try:
            await self.attempt("HSET", status_key(self._run_id), *words(status.on_the_wire()))
        except FAILURES as error:
            self.note_absence(error)

    async def _is_answered(self, command: Command) -> bool:
        """True if a previous supervisor answered the command but was killed before it saved its
        position in the stream."""
        state = await self.call("HGET", outcome_key(self._run_id, command.id), "state")
        return state is not None and state != OutcomeState.ACCEPTED.value

    def _places_before(self, place: str) -> bool:
        """True if an earlier command is still unanswered."""
        return any(_order(other) < _order(place) for other in self._places.values())


def _entries(answer: Any) -> list[tuple[str, dict[str, str]]]:
    """[[stream, [(place, fields), …]]] → [(place, fields), …]"""
    return [entry for _, entries in answer or [] for entry in entries]


def _order(place: str) -> tuple[int, int]:
    milliseconds, _, number = place.partition("-")
    return int(milliseconds), int(number)
