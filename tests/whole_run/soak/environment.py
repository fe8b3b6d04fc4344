"""An environment of the soak: `python -m tests.whole_run.soak.environment OPTIONS`.

It sends groups until SIGTERM, then completes its parts, disconnects and exits. Sometimes it
disconnects and registers again under a new id. After a kill it continues under the id in its
journal.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import httpx
from pydantic import BaseModel

from grpo_core.clients.run_api import EnvironmentClient
from grpo_core.wire.run_api import EnvironmentRegistration
from tests.whole_run.soak.journal import Joined, Journal
from tests.whole_run.soak.sending import GroupMaker, ListClient, Sender

_WORKERS = 4
_POLL_S = 0.2
_MAX_QUEUED_SEQUENCES = 256
_CALLS_OF_A_MEMBERSHIP = (100, 600)


class Options(BaseModel):
    """Options. `urls`: its own run-api, then the other replica; `minimum`: its share of every
    batch; `deadline_s`: of every call."""

    number: int
    urls: list[str]
    group_size: int
    minimum: float
    journal: Path
    deadline_s: float
    seed: int


@dataclass
class Environment:
    """`stopping` is set when the environment must disconnect and exit."""

    options: Options
    journal: Journal
    client: EnvironmentClient
    lists: ListClient
    stopping: threading.Event

    def __post_init__(self) -> None:
        options, life = self.options, self.journal.life
        self._maker = GroupMaker(options.number, life, options.seed)
        self._dice = random.Random(f"{options.seed}/{options.number}/{life}")
        self._calls_left = 0

    async def run(self) -> None:
        past = [entry for entry in self.journal.past if isinstance(entry, Joined)]
        joined = past[-1] if past and past[-1].env_id is not None else None
        while not self.stopping.is_set() or joined is not None:
            if joined is None:
                joined = await self._join()
            else:
                await self._stay(joined)
                joined = None

    async def _join(self) -> Joined | None:
        """Register; None while there is no trainer."""
        options = self.options
        registration = EnvironmentRegistration(
            max_token_length=4096,
            desired_name=f"soak-{options.number}",
            weight=1.0,
            group_size=options.group_size,
            min_batch_allocation=options.minimum or None,
        )
        answer = await self.client.register(registration)
        if answer is None:
            await asyncio.sleep(_POLL_S)
            return None
        joined = Joined(env_id=answer["env_id"], run_uuid=answer["run_uuid"])
        self.journal.write(joined)
        return joined

    async def _stay(self, joined: Joined) -> None:
        """Send groups from registration to disconnection."""
        env_id = joined.env_id
        assert env_id is not None
        self._calls_left = self._dice.randint(*_CALLS_OF_A_MEMBERSHIP)
        sender = Sender(
            env_id,
            joined.run_uuid,
            self.options.group_size,
            self.client,
            self.lists,
            self._maker,
            self.journal,
            self._dice,
        )
        async with asyncio.TaskGroup() as workers:
            for _ in range(_WORKERS):
                workers.create_task(self._work(env_id, sender))
        await sender.complete_parts()
        # Written first: after a kill here, the next process must not use this id.
        self.journal.write(Joined(env_id=None))
        await self.client.disconnect(env_id)

    async def _work(self, env_id: int, sender: Sender) -> None:
        while self._calls_left > 0 and not self.stopping.is_set():
            status = await self.client.status(env_id)
            if status.queue_size * self.options.group_size >= _MAX_QUEUED_SEQUENCES:
                await asyncio.sleep(_POLL_S)
                continue
            self._calls_left -= 1
            await sender.act()


async def _run(options: Options, journal: Journal, stopping: threading.Event) -> None:
    async with (
        EnvironmentClient(options.urls[0], options.deadline_s) as client,
        httpx.AsyncClient() as http,
    ):
        lists = ListClient(options.urls, options.deadline_s, http)
        await Environment(options, journal, client, lists, stopping).run()


def main() -> None:
    options = Options.model_validate_json(sys.argv[1])
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    with Journal(options.journal) as journal:
        asyncio.run(_run(options, journal, stopping))


if __name__ == "__main__":
    main()
