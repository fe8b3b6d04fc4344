"""An environment of the soak: `python -m tests.soak.environment --help`.

It sends groups until SIGTERM, then completes the parts it has open, leaves the run and ends. Now
and then it leaves on its own and comes back as a new member. Killed and started again, it goes on
under the id that its journal holds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import structlog

from grpo_core.errors import RequestRefused
from grpo_core.logs import configure_logging
from grpo_core.run_api_client import EnvironmentClient
from grpo_core.wire import EnvironmentRegistration, EnvironmentStatus
from tests.soak.groups import GroupMaker
from tests.soak.journal import Joined, Journal, Noted, read_journal
from tests.soak.keyed_calls import KeyedSender
from tests.soak.producer import Producer, Senders

FORGOTTEN = "environment forgotten by run-api"

_WORKERS = 3
_IMPATIENT_S = 0.5
_POLL_S = 0.2
_JOIN_EVERY_S = 0.1
_MAX_QUEUED_SEQUENCES = 256
_STAYS_FOR_CALLS = (100, 600)
_NOT_FOUND = 404
_GONE = -1

log = structlog.get_logger()


@dataclass(frozen=True)
class Options:
    number: int
    url: str
    other_url: str
    journal: Path
    group_size: int
    minimum: float
    seed: int
    deadline_s: float


class Environment:
    """Args: stopping: set where the environment is to leave the run for good."""

    def __init__(
        self, options: Options, journal: Journal, senders: Senders, stopping: threading.Event
    ) -> None:
        self._options = options
        self._stopping = stopping
        self._journal = journal
        self._senders = senders
        self._maker = GroupMaker(options.number, journal.life, options.seed)
        self._dice = random.Random(f"{options.seed}/{options.number}/{journal.life}")
        self._has_room = asyncio.Event()
        self._calls_left = 0

    async def run(self) -> None:
        env_id = _last_membership(self._options.journal)
        while not self._stopping.is_set():
            env_id = await self._join() if env_id is None else env_id
            if env_id is not None:
                env_id = await self._stay(env_id)
        if env_id is not None:
            await self._leave(env_id)

    async def _join(self) -> int | None:
        registration = EnvironmentRegistration(
            max_token_length=4096,
            desired_name=f"soak-{self._options.number}",
            weight=1.0,
            group_size=self._options.group_size,
            min_batch_allocation=self._options.minimum or None,
        )
        with self._journal.timed("register-env"):
            answer = await self._senders.patient.register(registration)
        if answer is None:
            await asyncio.sleep(_JOIN_EVERY_S)
            return None
        env_id = int(answer["env_id"])
        self._journal.write(Joined(env_id=env_id), durably=True)
        return env_id

    async def _stay(self, env_id: int) -> int | None:
        """A membership, to its end or ours; returns the id where it is still ours."""
        self._calls_left = self._dice.randint(*_STAYS_FOR_CALLS)
        producer = self._producer(env_id)
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch(env_id))
            await asyncio.wait([tasks.create_task(self._work(producer)) for _ in range(_WORKERS)])
            watch.cancel()
        if not watch.cancelled():
            return None
        if self._stopping.is_set():
            return env_id
        await self._leave(env_id)
        return None

    async def _work(self, producer: Producer) -> None:
        while self._calls_left > 0 and not self._stopping.is_set():
            if not self._has_room.is_set():
                await asyncio.sleep(_POLL_S / 4)
                continue
            self._calls_left -= 1
            await producer.act()

    async def _watch(self, env_id: int) -> None:
        """Poll the queue; returns where run-api does not know this environment any more."""
        while True:
            try:
                with self._journal.timed("status-env"):
                    status = await self._senders.patient.status(env_id)
            except RequestRefused as error:
                if error.status != _NOT_FOUND:
                    raise
                self._journal.write(Noted(what=FORGOTTEN))
                self._calls_left = 0
                return
            self._pace(status)
            await asyncio.sleep(_POLL_S)

    def _pace(self, status: EnvironmentStatus) -> None:
        if status.queue_size * self._options.group_size < _MAX_QUEUED_SEQUENCES:
            self._has_room.set()
        else:
            self._has_room.clear()

    async def _leave(self, env_id: int) -> None:
        await self._producer(env_id).complete_parts()
        with self._journal.timed("disconnect-env"):
            await self._senders.patient.disconnect(env_id)
        self._journal.write(Joined(env_id=_GONE), durably=True)

    def _producer(self, env_id: int) -> Producer:
        return Producer(
            env_id, self._options.group_size, self._senders, self._maker, self._journal, self._dice
        )


def _last_membership(journal: Path) -> int | None:
    """The id under which the process before this one was a member."""
    joined = [entry.env_id for entry in read_journal(journal) if isinstance(entry, Joined)]
    return joined[-1] if joined and joined[-1] != _GONE else None


async def _run(options: Options, journal: Journal, stopping: threading.Event) -> None:
    async with (
        EnvironmentClient(options.url, options.deadline_s) as patient,
        EnvironmentClient(options.url, _IMPATIENT_S) as impatient,
        KeyedSender([options.url, options.other_url], options.deadline_s) as keyed,
    ):
        senders = Senders(patient, impatient, keyed)
        await Environment(options, journal, senders, stopping).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--url", required=True, help="the run-api of this environment")
    parser.add_argument("--other-url", required=True, help="the other replica")
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--minimum", type=float, default=0.0, help="its share of every batch")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--deadline-s", type=float, required=True, help="of every call")
    options = Options(**vars(parser.parse_args()))
    configure_logging(f"environment-{options.number}")
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    with Journal(options.journal) as journal:
        asyncio.run(_run(options, journal, stopping))
    log.info("left the run")


if __name__ == "__main__":
    main()
