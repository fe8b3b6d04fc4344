"""Groups that are unique, and ways to send them in the soak, each recorded in the journal."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import random
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import httpx

from grpo_core.clients.run_api import EnvironmentClient
from grpo_core.clients.service import TransientAnswer, check_answer
from grpo_core.errors import GrpoError, RequestRefused, ServiceUnavailable
from grpo_core.wire.fields import MASKED
from grpo_core.wire.scored_group import ScoredGroup
from tests.whole_run.journal import Journal, Outcome

_MAX_TOKEN = 150_000
_SHORT_TOKENS = 6
_LONG_EVERY, _LONG_TOKENS = 25, 400
"""One group in 25 is large enough to be sent gzip-encoded."""
_HUGE_EVERY, _PADDING_BYTES = 150, 1_200_000
"""One group in 150 is above 1 MiB even compressed, so run-api stores it in pieces."""


class GroupMaker:
    """Creates groups whose sequences start with sender, process number and sequence number.

    Args:
        life: number of this process among the sender's processes
    """

    def __init__(self, sender: int, life: int, seed: int) -> None:
        self._origin = [sender, life]
        self._dice = random.Random(f"{seed}/{sender}/{life}")
        self._made = 0

    def make(self, size: int, env_id: int | None) -> ScoredGroup:
        """A group of `size` sequences, each with one prompt token."""
        self._made += 1
        length = _SHORT_TOKENS if self._made % _LONG_EVERY else _LONG_TOKENS
        tokens = [
            [
                *self._origin,
                self._made,
                i,
                *(self._dice.randrange(_MAX_TOKEN) for _ in range(length)),
            ]
            for i in range(size)
        ]
        return ScoredGroup(
            tokens=tokens,
            masks=[[MASKED, *sequence[1:]] for sequence in tokens],
            scores=[self._dice.random() for _ in tokens],
            env_id=env_id,
            group_overrides=None if self._made % _HUGE_EVERY else self._padding(),
        )

    def _padding(self) -> dict[str, str]:
        """Random text. Compression only removes the overhead of base64."""
        return {"padding": base64.b64encode(self._dice.randbytes(_PADDING_BYTES)).decode()}


def digest(group: ScoredGroup) -> str:
    return _digest(json.dumps(group.tokens))


def content_digest(groups: Sequence[ScoredGroup]) -> str:
    """Digest of a batch's whole content, in order."""
    return _digest("\n".join(group.model_dump_json() for group in groups))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


READY = "ready"
"""What environments and trainer print once they exit cleanly on SIGTERM."""
REPEATED = "repeat answered like the first call"
OTHER_BODY_REFUSED = "other body under a used key refused"

_ATTEMPT_S = 30.0
_REPEAT_EVERY_S = 0.1
_MAX_HANG_UP_S = 0.02
_MAX_FILLERS = 500
_UNPROCESSABLE = 422


class PromiseBroken(GrpoError):
    """run-api answered a repeat differently, accepted a changed repeat, or kept a part forever."""


@dataclass(frozen=True)
class ListClient:
    """Sends lists of groups with the caller's idempotency key, to any replica that answers."""

    urls: Sequence[str]
    deadline_s: float
    http: httpx.AsyncClient

    async def send(self, groups: Sequence[ScoredGroup], key: str) -> Any:
        """Send until an answer comes. Every retry goes to the other replica.

        Raises:
            RequestRefused: 4xx
            ServiceUnavailable: an error for which a retry is useless
            TimeoutError: no answer within the deadline
        """
        async with asyncio.timeout(self.deadline_s):
            for url in cycle(self.urls):
                try:
                    return await self.post(url, groups, key, _ATTEMPT_S)
                except (httpx.TransportError, TransientAnswer):
                    await asyncio.sleep(_REPEAT_EVERY_S)

    async def hang_up(self, groups: Sequence[ScoredGroup], key: str, after_s: float) -> Any:
        """Send, and close the connection after `after_s`, which raises `ServiceUnavailable`."""
        try:
            return await self.post(self.urls[0], groups, key, after_s)
        except (httpx.TransportError, TransientAnswer) as error:
            raise ServiceUnavailable(f"hung up: {error!r}") from error

    async def post(self, url: str, groups: Sequence[ScoredGroup], key: str, read_s: float) -> Any:
        body = b"[" + b",".join(group.model_dump_json().encode() for group in groups) + b"]"
        response = await self.http.post(
            f"{url}/scored_data_list",
            content=body,
            headers={"content-type": "application/json", "idempotency-key": key},
            timeout=httpx.Timeout(_ATTEMPT_S, read=read_s),
        )
        check_answer(response, "run-api")
        return response.json()


@dataclass(frozen=True)
class Sender:
    """`env_id`, `run_uuid`: from run-api. `group_size`: sequences in a whole group. `client`
    retries by itself."""

    env_id: int
    run_uuid: str
    group_size: int
    client: EnvironmentClient
    lists: ListClient
    maker: GroupMaker
    journal: Journal
    dice: random.Random

    async def act(self) -> None:
        """Send groups in a random way.

        Raises:
            GrpoError: run-api broke a promise, or did not answer within the deadline.
        """
        ways: dict[Callable[[], Awaitable[None]], int] = {
            self._send_whole: 60,
            self._send_parts: 12,
            self._send_list: 14,
            self._hang_up: 14,
        }
        (way,) = self.dice.choices(list(ways), list(ways.values()))
        await way()

    async def complete_parts(self) -> None:
        """Send parts of one sequence until the environment's buffer is empty."""
        for _ in range(_MAX_FILLERS):
            answer = await self._submit(self._make(1))
            if not answer.get("buffer_size"):
                return
        raise PromiseBroken(f"environment {self.env_id}: {_MAX_FILLERS} parts complete no group")

    async def _send_whole(self) -> None:
        await self._submit(self._make(self.group_size))

    async def _send_parts(self) -> None:
        for size in self._split():
            await self._submit(self._make(size))

    async def _send_list(self) -> None:
        """Send; sometimes repeat with the same key, sometimes with a changed body."""
        groups, key = self._some_groups(), uuid.uuid4().hex
        answer = await self._deliver(self._begin(groups), self.lists.send(groups, key))
        if self.dice.random() < 0.3:
            if (again := await self.lists.send(groups, key)) != answer:
                raise PromiseBroken(f"answered {answer}, then {again} under the same key")
            self.journal.note(noted=REPEATED)
        if self.dice.random() < 0.1:
            await self._send_other_body(key)

    async def _send_other_body(self, key: str) -> None:
        others = self._some_groups()
        call = self._begin(others)
        try:
            await self.lists.send(others, key)
        except RequestRefused as error:
            if error.status != _UNPROCESSABLE:
                raise
            self.journal.settled(call, Outcome.REFUSED)
            self.journal.note(noted=OTHER_BODY_REFUSED)
        else:
            raise PromiseBroken("another body under a used key was taken")

    async def _hang_up(self) -> None:
        """Abort a call; in half of the cases repeat it later for its answer."""
        groups, key = self._some_groups(), uuid.uuid4().hex
        call = self._begin(groups)
        after_s = self.dice.random() * _MAX_HANG_UP_S
        try:
            await self._deliver(call, self.lists.hang_up(groups, key, after_s))
        except ServiceUnavailable:
            self.journal.settled(call, Outcome.UNANSWERED)
        if self.dice.random() < 0.5:
            await self._deliver(call, self.lists.send(groups, key))

    async def _submit(self, group: ScoredGroup) -> dict[str, Any]:
        sending = self.client.submit(group, self.run_uuid)
        answer: dict[str, Any] = await self._deliver(self._begin([group]), sending)
        return answer

    def _begin(self, groups: Sequence[ScoredGroup]) -> str:
        return self.journal.sent({digest(group): group.size for group in groups})

    async def _deliver(self, call: str, sending: Awaitable[Any]) -> Any:
        """Make a call that must succeed, else the process ends."""
        answer = await sending
        self.journal.settled(call, Outcome.ACKNOWLEDGED)
        return answer

    def _some_groups(self) -> list[ScoredGroup]:
        """Whole groups mixed with parts that add up to one."""
        sizes: list[int] = []
        for _ in range(self.dice.randint(1, 3)):
            sizes += self._split() if self.dice.random() < 0.4 else [self.group_size]
        return [self._make(size) for size in sizes]

    def _split(self) -> list[int]:
        """Random sizes of two parts of one group."""
        first = self.dice.randint(1, self.group_size - 1)
        return [first, self.group_size - first]

    def _make(self, size: int) -> ScoredGroup:
        return self.maker.make(size, self.env_id)
