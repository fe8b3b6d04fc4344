"""A thread that acts as an inference server, as far as Redis shows it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from redis import Redis

from grpo_core.weights.servers import ServerState, ServerStatus, server_key, servers_key
from grpo_core.weights.version_log import VersionLog
from grpo_core.weights.versions import Announcement
from tests.support.wait import DEADLINE_S, wait_for

Reply = Callable[["StandIn", Announcement], None]
BEAT_S = 0.01


class StandIn:
    """Follows the versions of a run. What it does with one is up to `reply`."""

    def __init__(
        self, url: str, run_id: str, name: str = "a", reply: Reply | None = None, **status: Any
    ) -> None:
        self.redis: Redis = Redis.from_url(url, decode_responses=True, protocol=2)
        self.run_id, self.name = run_id, name
        self.reply = reply or StandIn.adopt
        self.seen: list[Announcement] = []
        self.says = ServerStatus(
            name=name, state=ServerState.SERVING, url=f"http://{name}", epoch=0, step=0
        ).model_copy(update=status)
        self.speaks = True
        self._versions = VersionLog(url, run_id, DEADLINE_S)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> StandIn:
        self._thread.start()
        wait_for(lambda: self.redis.exists(server_key(self.run_id, self.name)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.redis.close()
        self._versions.close()

    def adopt(self, announced: Announcement) -> None:
        """Serve the version."""
        self.says = self.says.model_copy(
            update={**announced.version.fields(), "in_use": announced.id}
        )

    def becomes(self, **changes: Any) -> None:
        """Return once Redis has the new status."""
        self.says = self.says.model_copy(update=changes)
        self.report()

    def leave(self) -> None:
        """Like a server that was killed, 10 seconds later."""
        with self._lock:
            self.speaks = False
            self.redis.delete(server_key(self.run_id, self.name))

    def report(self) -> None:
        with self._lock:
            if self.speaks:
                self.redis.sadd(servers_key(self.run_id), self.name)
                key = server_key(self.run_id, self.name)
                self.redis.hset(key, mapping=self.says.on_the_wire())

    def _work(self) -> None:
        while not self._stop.wait(BEAT_S):
            head = self._versions.head()
            if head is not None and self.speaks and head != (self.seen or [None])[-1]:
                self.seen.append(head)
                self.reply(self, head)
            self.report()


def ignore(_server: StandIn, _announced: Announcement) -> None:
    """A server that keeps what it has."""


def refuse(server: StandIn, announced: Announcement) -> None:
    server.says = server.says.model_copy(
        update={"refused": announced.id, "reason": "rank 64, at most 16"}
    )


def depart(server: StandIn, _announced: Announcement) -> None:
    server.leave()
