"""What an environment of the soak sends, in every way that there is, and its record of it."""

from __future__ import annotations

import random
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_core.errors import GrpoError, RequestRefused, ServiceUnavailable
from grpo_core.run_api_client import EnvironmentClient
from grpo_core.wire import ScoredGroup
from tests.soak.groups import GroupMaker, digest
from tests.soak.journal import Journal, Noted, Outcome
from tests.soak.keyed_calls import KeyedSender

ANSWERED_FROM_RECORD = "repeat answered from the record"
ANSWERED_DIFFERENTLY = "repeat answered differently"
OTHER_BODY_REFUSED = "other body under a used key refused"
OTHER_BODY_TAKEN = "other body under a used key taken"
ANSWERED_AFTER_HANG_UP = "answered after a hang-up"

_MAX_HANG_UP_S = 0.02
_MAX_FILLERS = 500
_UNPROCESSABLE = 422


class PartsNeverComplete(GrpoError):
    """run-api goes on saying that sequences wait in a buffer which parts of 1 must complete."""


@dataclass(frozen=True)
class Senders:
    """Ways to run-api. The impatient one gives up while the others still try."""

    patient: EnvironmentClient
    impatient: EnvironmentClient
    keyed: KeyedSender


class Producer:
    """Args:
    env_id: who sends, as run-api knows it.
    group_size: sequences of a whole group of this environment.
    """

    def __init__(
        self,
        env_id: int,
        group_size: int,
        senders: Senders,
        maker: GroupMaker,
        journal: Journal,
        dice: random.Random,
    ) -> None:
        self._env_id = env_id
        self._group_size = group_size
        self._senders = senders
        self._maker = maker
        self._journal = journal
        self._dice = dice

    async def act(self) -> None:
        """One of the ways to send, drawn by weight.

        Raises:
            GrpoError: run-api refused what it must take, or stayed away beyond the deadline.
        """
        ways: dict[Callable[[], Awaitable[None]], int] = {
            self._send_whole: 60,
            self._send_parts: 12,
            self._send_list: 14,
            self._send_impatiently: 7,
            self._hang_up: 7,
        }
        (way,) = self._dice.choices(list(ways), list(ways.values()))
        await way()

    async def complete_parts(self) -> None:
        """Send parts of one sequence until nothing waits in the environment's buffer.

        Raises:
            PartsNeverComplete
        """
        for _ in range(_MAX_FILLERS):
            answer = await self._submit(self._make(1))
            if not answer.get("buffer_size"):
                return
        raise PartsNeverComplete(f"environment {self._env_id}: {_MAX_FILLERS} parts sent in vain")

    async def _send_whole(self) -> None:
        await self._submit(self._make(self._group_size))

    async def _send_parts(self) -> None:
        for size in self._split():
            await self._submit(self._make(size))

    async def _send_impatiently(self) -> None:
        group = self._make(self._group_size)
        await self._give_up_on(
            "submit, impatient", [group], lambda: self._senders.impatient.submit(group)
        )

    async def _send_list(self) -> None:
        """A list, sometimes a second time under the same key, sometimes with another body."""
        groups, key = self._some_groups(), uuid.uuid4().hex
        answer = await self._deliver("list", groups, lambda: self._list_call(groups, key))
        if self._dice.random() < 0.3:
            again = await self._list_call(groups, key)
            same = again == answer
            self._note(ANSWERED_FROM_RECORD if same else ANSWERED_DIFFERENTLY)
        if self._dice.random() < 0.1:
            await self._send_other_body(key)

    async def _send_other_body(self, key: str) -> None:
        others = self._some_groups()
        call = self._begin(others)
        try:
            await self._list_call(others, key)
        except RequestRefused as error:
            if error.status != _UNPROCESSABLE:
                raise
            self._journal.settled(call, Outcome.WANTED_REFUSAL)
            self._note(OTHER_BODY_REFUSED)
        else:
            self._journal.settled(call, Outcome.ACKNOWLEDGED)
            self._note(OTHER_BODY_TAKEN)

    async def _hang_up(self) -> None:
        """Close the connection in the middle of a call; half the time, ask for its answer later."""
        groups, key = self._some_groups(), uuid.uuid4().hex
        body, after_s = _list_body(groups), self._dice.random() * _MAX_HANG_UP_S
        if self._dice.random() < 0.5:
            await self._give_up_on(
                "list, hung up",
                groups,
                lambda: self._senders.keyed.hang_up("/scored_data_list", body, key, after_s),
            )
            return
        call = self._begin(groups)
        try:
            await self._senders.keyed.hang_up("/scored_data_list", body, key, after_s)
        except ServiceUnavailable:
            with self._journal.timed("list"):
                await self._list_call(groups, key)
            self._note(ANSWERED_AFTER_HANG_UP)
        self._journal.settled(call, Outcome.ACKNOWLEDGED)

    async def _submit(self, group: ScoredGroup) -> dict[str, Any]:
        answer: dict[str, Any] = await self._deliver(
            "submit", [group], lambda: self._senders.patient.submit(group)
        )
        return answer

    async def _list_call(self, groups: Sequence[ScoredGroup], key: str) -> Any:
        return await self._senders.keyed.send("/scored_data_list", _list_body(groups), key)

    async def _deliver(
        self, kind: str, groups: Sequence[ScoredGroup], send: Callable[[], Awaitable[Any]]
    ) -> Any:
        """A call that must succeed; anything else ends the process."""
        call = self._begin(groups)
        try:
            with self._journal.timed(kind):
                answer = await send()
        except RequestRefused as error:
            self._journal.settled(call, Outcome.REFUSED, str(error))
            raise
        self._journal.settled(call, Outcome.ACKNOWLEDGED)
        return answer

    async def _give_up_on(
        self, kind: str, groups: Sequence[ScoredGroup], send: Callable[[], Awaitable[Any]]
    ) -> None:
        """A call that may stay without an answer."""
        call = self._begin(groups)
        try:
            with self._journal.timed(kind):
                await send()
        except ServiceUnavailable as error:
            self._journal.settled(call, Outcome.UNANSWERED, str(error))
        else:
            self._journal.settled(call, Outcome.ACKNOWLEDGED)

    def _begin(self, groups: Sequence[ScoredGroup]) -> str:
        return self._journal.sent([digest(group) for group in groups], [g.size for g in groups])

    def _note(self, what: str) -> None:
        self._journal.write(Noted(what=what))

    def _some_groups(self) -> list[ScoredGroup]:
        """Whole groups and parts that make up one, mixed."""
        sizes: list[int] = []
        for _ in range(self._dice.randint(1, 3)):
            sizes += self._split() if self._dice.random() < 0.4 else [self._group_size]
        return [self._make(size) for size in sizes]

    def _split(self) -> list[int]:
        """Sizes of two or three parts of one group."""
        sizes: list[int] = []
        rest = self._group_size
        while rest > 1 and len(sizes) < 2:
            sizes.append(self._dice.randint(1, rest - 1))
            rest -= sizes[-1]
        return [*sizes, rest]

    def _make(self, size: int) -> ScoredGroup:
        return self._maker.make(size, self._env_id)


def _list_body(groups: Sequence[ScoredGroup]) -> bytes:
    return b"[" + b",".join(group.model_dump_json().encode() for group in groups) + b"]"
