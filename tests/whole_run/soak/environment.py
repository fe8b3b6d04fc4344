"""An environment of the soak: `python -m tests.whole_run.soak.environment OPTIONS`.

It sends groups until SIGTERM, then completes its parts, disconnects and exits. Sometimes it
disconnects and registers again under a new id. After a kill it continues under the id in its
journal.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from grpo_core.clients.run_api import EnvironmentClient
from grpo_core.wire.run_api import EnvironmentRegistration
from tests.whole_run.journal import VARIABLE, Journal
from tests.whole_run.soak.sending import READY, GroupMaker, ListClient, Sender

_WORKERS = 4
_POLL_S = 0.2
_MAX_QUEUED_SEQUENCES = 256
_CALLS_OF_A_MEMBERSHIP = (100, 600)


@dataclass
class Environment:
    """`minimum`: its share of every batch; `stopping` is set when the environment must disconnect
    and exit."""

    journal: Journal
    client: EnvironmentClient
    lists: ListClient
    stopping: threading.Event
    number: int
    group_size: int
    minimum: float
    seed: int

    def __post_init__(self) -> None:
        life = self.journal.life
        self._maker = GroupMaker(self.number, life, self.seed)
        self._dice = random.Random(f"{self.seed}/{self.number}/{life}")
        self._calls_left = 0

    async def run(self) -> None:
        joined = next((e["joined"] for e in self.journal.past[::-1] if "joined" in e), None)
        while not self.stopping.is_set() or joined is not None:
            if joined is None:
                joined = await self._join()
            else:
                await self._stay(joined)
                joined = None

    async def _join(self) -> dict[str, Any] | None:
        """Register; None while there is no trainer."""
        registration = EnvironmentRegistration(
            max_token_length=4096,
            desired_name=f"soak-{self.number}",
            weight=1.0,
            group_size=self.group_size,
            min_batch_allocation=self.minimum or None,
        )
        answer = await self.client.register(registration)
        if answer is None:
            await asyncio.sleep(_POLL_S)
            return None
        self.journal.note(joined=answer)
        return answer

    async def _stay(self, joined: dict[str, Any]) -> None:
        """Send groups from registration to disconnection."""
        env_id = joined["env_id"]
        self._calls_left = self._dice.randint(*_CALLS_OF_A_MEMBERSHIP)
        sender = Sender(
            env_id,
            joined["run_uuid"],
            self.group_size,
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
        self.journal.note(joined=None)
        await self.client.disconnect(env_id)

    async def _work(self, env_id: int, sender: Sender) -> None:
        while self._calls_left > 0 and not self.stopping.is_set():
            status = await self.client.status(env_id)
            if status.queue_size * self.group_size >= _MAX_QUEUED_SEQUENCES:
                await asyncio.sleep(_POLL_S)
                continue
            self._calls_left -= 1
            await sender.act()


async def _run(
    journal: Journal, stopping: threading.Event, urls: list[str], deadline_s: float, **options: Any
) -> None:
    """Args: urls: its own run-api, then the other replica; deadline_s: of every call"""
    async with EnvironmentClient(urls[0], deadline_s) as client, httpx.AsyncClient() as http:
        lists = ListClient(urls, deadline_s, http)
        await Environment(journal, client, lists, stopping, **options).run()


def main() -> None:
    options = json.loads(sys.argv[1])
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    journal = Journal(Path(os.environ[VARIABLE]), f"environment-{options['number']}")
    sys.stdout.write(f"{READY}\n")
    asyncio.run(_run(journal, stopping, **options))


if __name__ == "__main__":
    main()
