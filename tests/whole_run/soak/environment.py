"""An environment of the soak: `python -m tests.whole_run.soak.environment OPTIONS`.

It sends groups in several ways until SIGTERM, then completes its parts, disconnects and exits.
Sometimes it disconnects and registers again under a new id. After a kill it continues under the id
in its journal.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx

from grpo_core.clients.run_api import EnvironmentClient
from grpo_core.clients.service import TransientAnswer, check_answer
from grpo_core.errors import GrpoError, RequestRefused
from grpo_core.wire.run_api import EnvironmentRegistration
from grpo_core.wire.scored_group import ScoredGroup
from tests.whole_run.journal import VARIABLE, Journal, Outcome
from tests.whole_run.soak.groups import OTHER_BODY_REFUSED, READY, REPEATED, GroupMaker, digest

_WORKERS = 4
_POLL_S = 0.2
_MAX_QUEUED_SEQUENCES = 256
_CALLS_OF_A_MEMBERSHIP = (100, 600)
_ATTEMPT_S = 30.0
_REPEAT_EVERY_S = 0.1
_MAX_HANG_UP_S = 0.02
_MAX_FILLERS = 500
_UNPROCESSABLE = 422


class PromiseBroken(GrpoError):
    """run-api answered a repeat differently, accepted a changed repeat, or kept a part forever."""


@dataclass
class Environment:
    """`client` retries by itself; `urls`: its own run-api, then the other replica; `deadline_s`: of
    every call; `minimum`: its share of every batch; `stopping` is set when the environment must
    disconnect and exit."""

    journal: Journal
    client: EnvironmentClient
    http: httpx.AsyncClient
    stopping: threading.Event
    urls: list[str]
    deadline_s: float
    number: int
    group_size: int
    minimum: float
    seed: int

    def __post_init__(self) -> None:
        life = self.journal.life
        self._maker = GroupMaker(self.number, life, self.seed)
        self._dice = random.Random(f"{self.seed}/{self.number}/{life}")
        self._calls_left = 0
        past = [entry["joined"] for entry in self.journal.past if "joined" in entry]
        self._joined: dict[str, Any] | None = past[-1] if past else None

    async def run(self) -> None:
        while not self.stopping.is_set() or self._joined:
            if self._joined:
                await self._stay(self._joined["env_id"])
            else:
                await self._join()

    async def _join(self) -> None:
        """Register, if there is a trainer."""
        registration = EnvironmentRegistration(
            max_token_length=4096,
            desired_name=f"soak-{self.number}",
            weight=1.0,
            group_size=self.group_size,
            min_batch_allocation=self.minimum or None,
        )
        self._joined = await self.client.register(registration)
        if self._joined is None:
            await asyncio.sleep(_POLL_S)
        else:
            self.journal.note(joined=self._joined)

    async def _stay(self, env_id: int) -> None:
        """Send groups from registration to disconnection."""
        self._calls_left = self._dice.randint(*_CALLS_OF_A_MEMBERSHIP)
        async with asyncio.TaskGroup() as workers:
            for _ in range(_WORKERS):
                workers.create_task(self._work(env_id))
        await self._complete_parts()
        # Written first: after a kill here, the next process must not use this id.
        self.journal.note(joined=None)
        await self.client.disconnect(env_id)
        self._joined = None

    async def _work(self, env_id: int) -> None:
        """Send in random ways. An error ends the process: run-api broke a promise, or did not
        answer within the deadline."""
        ways: dict[Callable[[], Awaitable[object]], int] = {
            self._send_whole: 60,
            self._send_parts: 12,
            self._send_list: 14,
            self._hang_up: 14,
        }
        while self._calls_left > 0 and not self.stopping.is_set():
            status = await self.client.status(env_id)
            if status.queue_size * self.group_size >= _MAX_QUEUED_SEQUENCES:
                await asyncio.sleep(_POLL_S)
                continue
            self._calls_left -= 1
            (way,) = self._dice.choices(list(ways), list(ways.values()))
            await way()

    async def _complete_parts(self) -> None:
        """Send parts of one sequence until run-api's buffer of this environment is empty."""
        for _ in range(_MAX_FILLERS):
            if not (await self._submit(1)).get("buffer_size"):
                return
        raise PromiseBroken(f"{_MAX_FILLERS} parts complete no group")

    async def _send_whole(self) -> None:
        await self._submit(self.group_size)

    async def _send_parts(self) -> None:
        for size in self._split():
            await self._submit(size)

    async def _send_list(self) -> None:
        """Send; sometimes repeat with the same key, sometimes with a changed body."""
        groups, key = self._some_groups(), uuid.uuid4().hex
        answer = await self._deliver(self._begin(groups), self._post(groups, key))
        if self._dice.random() < 0.3:
            if (again := await self._post(groups, key)) != answer:
                raise PromiseBroken(f"answered {answer}, then {again} under the same key")
            self.journal.note(noted=REPEATED)
        if self._dice.random() < 0.1:
            await self._send_other_body(key)

    async def _send_other_body(self, key: str) -> None:
        others = self._some_groups()
        call = self._begin(others)
        try:
            await self._post(others, key)
        except RequestRefused as error:
            if error.status != _UNPROCESSABLE:
                raise
            self.journal.settled(call, Outcome.REFUSED)
            self.journal.note(noted=OTHER_BODY_REFUSED)
        else:
            raise PromiseBroken("another body under a used key was taken")

    async def _hang_up(self) -> None:
        """Close the connection before the answer; in half of the cases repeat the call later for
        it."""
        groups, key = self._some_groups(), uuid.uuid4().hex
        call = self._begin(groups)
        after_s = self._dice.random() * _MAX_HANG_UP_S
        try:
            await self._deliver(call, self._post_once(self.urls[0], groups, key, after_s))
        except (httpx.TransportError, TransientAnswer):
            self.journal.settled(call, Outcome.UNANSWERED)
        if self._dice.random() < 0.5:
            await self._deliver(call, self._post(groups, key))

    async def _submit(self, size: int) -> dict[str, Any]:
        """One group of so many sequences."""
        assert self._joined is not None
        group = self._make(size)
        sending = self.client.submit(group, self._joined["run_uuid"])
        answer: dict[str, Any] = await self._deliver(self._begin([group]), sending)
        return answer

    async def _post(self, groups: Sequence[ScoredGroup], key: str) -> Any:
        """Send a list until an answer comes. Every retry goes to the other replica.

        Raises:
            RequestRefused: 4xx
            ServiceUnavailable: an error for which a retry is useless
            TimeoutError: no answer within the deadline
        """
        async with asyncio.timeout(self.deadline_s):
            for url in cycle(self.urls):
                try:
                    return await self._post_once(url, groups, key, _ATTEMPT_S)
                except (httpx.TransportError, TransientAnswer):
                    await asyncio.sleep(_REPEAT_EVERY_S)

    async def _post_once(
        self, url: str, groups: Sequence[ScoredGroup], key: str, read_s: float
    ) -> Any:
        body = b"[" + b",".join(group.model_dump_json().encode() for group in groups) + b"]"
        response = await self.http.post(
            f"{url}/scored_data_list",
            content=body,
            headers={"content-type": "application/json", "idempotency-key": key},
            timeout=httpx.Timeout(_ATTEMPT_S, read=read_s),
        )
        check_answer(response, "run-api")
        return response.json()

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
        for _ in range(self._dice.randint(1, 3)):
            sizes += self._split() if self._dice.random() < 0.4 else [self.group_size]
        return [self._make(size) for size in sizes]

    def _split(self) -> list[int]:
        """Random sizes of two parts of one group."""
        first = self._dice.randint(1, self.group_size - 1)
        return [first, self.group_size - first]

    def _make(self, size: int) -> ScoredGroup:
        assert self._joined is not None
        return self._maker.make(size, self._joined["env_id"])


async def _run(journal: Journal, stopping: threading.Event, options: dict[str, Any]) -> None:
    client = EnvironmentClient(options["urls"][0], options["deadline_s"])
    async with client, httpx.AsyncClient() as http:
        await Environment(journal, client, http, stopping, **options).run()


def main() -> None:
    options = json.loads(sys.argv[1])
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    journal = Journal(Path(os.environ[VARIABLE]), f"environment-{options['number']}")
    sys.stdout.write(f"{READY}\n")
    asyncio.run(_run(journal, stopping, options))


if __name__ == "__main__":
    main()
