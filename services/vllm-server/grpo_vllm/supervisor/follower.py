"""Follows the versions that the trainer announces: fetches, verifies and commits the newest one.

The follower decides only by the version log. It touches no file and no engine: those are behind
`Fetcher` and `CommitQueue`, and its clock is the event loop's. So a simulation can run a thousand
of them.

    join      before the first engine: bring the newest version here, which that engine starts with
    follow    while it serves: fetch each newer version in the background, then commit it
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import structlog

from grpo_core.errors import ProtocolViolation
from grpo_core.weights.directory_checks import UnusableWeights
from grpo_core.weights.ref import WeightRef
from grpo_core.weights.servers import ABSENT_AFTER_S
from grpo_core.weights.version_log import ServerVersionLog
from grpo_core.weights.versions import Announcement, VersionKind
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.supervisor.commits import CommitQueue, CommitRefused
from grpo_vllm.weights.fetch import Fetcher, FetchOverdue, Staged
from grpo_vllm.weights.staging import NotFetched, StagingFull

log = structlog.get_logger()

RETRY_S = 1.0
TICK_S = 1.0
NOT_TO_WAIT = (
    "This server waits for these weights; to serve --model instead, start it with "
    "--no-await-weights or with another --run-id"
)
BEFORE_ALL = PolicyVersion(0, 0)


Check = Callable[[Staged], Awaitable[None]]
"""Raises `UnusableWeights` if this server can never serve the version. Called twice: before the
fetch with a `Staged` without a directory, and after it."""


@dataclass
class Progress:
    """What the status reports. `head`: the newest announced version; `reason`: why it is not
    served; `lacks`: id of the version that no source has; `group`: the trainer's `GroupAddress`."""

    head: Announcement | None = None
    fetching: str = ""
    staged: str = ""
    reason: str = ""
    refused: str = ""
    lacks: str = ""
    group: str = ""
    fetch_s: float = 0.0
    pause_s: float = 0.0
    bytes: int = 0
    peer_bytes: int = 0


class Follower:
    """Fetches the newest announced version, then commits it.

    Args:
        max_staleness: steps; None for no limit
        check: whether this server can serve a version
        report: returns when others can read `progress`
    """

    def __init__(
        self,
        versions: ServerVersionLog,
        fetcher: Fetcher,
        commits: CommitQueue,
        check: Check,
        max_staleness: int | None,
        report: Callable[[], Awaitable[None]],
    ) -> None:
        self._versions = versions
        self._fetcher = fetcher
        self._commits = commits
        self._check = check
        self._max_staleness = max_staleness
        self._report = report
        self._held: dict[str, Staged] = {}
        self._served: Staged | None = None
        self._previous: Staged | None = None
        self._seen = BEFORE_ALL
        self.returning = self._overdue = False
        """Whether it is `behind` only until it has looked for newer versions, or fetched one."""
        self._returns_at: PolicyVersion | None = None
        self._ticked_at: float | None = None
        self.progress = Progress()
        self.changed = asyncio.Event()
        """Set when `behind` may have changed."""

    @property
    def in_use(self) -> frozenset[str]:
        """Ids of the versions whose files this server may still read."""
        here = self._held.values()
        names = (staged.directory.name for staged in here if staged.directory is not None)
        return frozenset([*self._held, *names]) | self._commits.in_use()

    @property
    def behind(self) -> str:
        """Why nothing may be sampled now; "" if it may."""
        self._check_absence()
        head, served = self.progress.head, self._served
        newest = head.id if head else "unknown"
        if self.returning:
            return f"this server was away; it first fetches the newest weights ({newest})"
        if self._overdue:
            return f"the newest weights ({newest}) are overdue: {self.progress.reason}"
        if head is None or served is None or self._max_staleness is None:
            return ""
        age = steps_between(served.announced.version, head.version)
        if age <= self._max_staleness:
            return ""
        return (
            f"the served weights are {age} steps older than the newest ({newest}); --max-staleness "
            f"allows {self._max_staleness}"
        )

    def returned(self) -> None:
        """Sample nothing before the newest version is served: this server may have missed some. If
        no version was ever announced, there is none to miss."""
        self.returning, self._returns_at = self.progress.head is not None, None
        self.changed.set()

    async def join(self, waits: bool) -> WeightRef | None:
        """A version, on this host; None if none was announced. It was the newest when its fetch
        began. Newer ones are fetched while it is served: with fetches slower than the trainer's
        steps, each fetch ends too late.

        Args:
            waits: for a source, as long as it takes

        Raises:
            NotFetched: it has no source, and `waits` is False.
            UnusableWeights: this server cannot serve it.
        """
        while (head := await self._versions.head()) is not None:
            self.progress.head = head
            try:
                staged = await self._fetched(head)
            except NotFetched as error:
                if not waits:
                    self._failed(head, error)
                    raise
                self._failed(head, type(error)(f"{error}. {NOT_TO_WAIT}"))
                await asyncio.sleep(RETRY_S)
                continue
            self._serves(staged)
            return weights_of(staged)
        return None

    async def follow(self) -> None:
        """Until cancelled."""
        beside = [
            asyncio.create_task(self._tick_for_ever()),
            asyncio.create_task(self._watch_head()),
        ]
        try:
            while True:
                await self._follow_once()
        finally:
            for task in beside:
                task.cancel()

    def begin_after(self, version: PolicyVersion) -> None:
        """Follow only versions above this one: this server serves --model in its place."""
        self._seen = version

    async def close(self) -> None:
        """Let nobody fetch from here any more."""
        for staged in list(self._held.values()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await self._fetcher.discard(staged)

    async def _follow_once(self) -> None:
        try:
            announced = await self._newest()
        except ProtocolViolation as error:
            log.error("announcement.invalid", reason=str(error))
            await asyncio.sleep(RETRY_S)
            return
        if announced is None:
            return
        self.progress.head = announced
        try:
            await self._catch_up(announced)
        except NotFetched as error:
            self._failed(announced, error)
            await asyncio.sleep(RETRY_S)
        except (UnusableWeights, CommitRefused) as error:
            self.progress.refused, self.progress.reason = announced.id, str(error)
            self._seen = announced.version
            log.error("weights.refused", version=announced.id, reason=str(error))
            await self._report()
        await self._tidy()

    async def _newest(self) -> Announcement | None:
        """The newest version, if it is newer than the last one that this server has handled."""
        if not self.returning:
            return await self._versions.next(self._seen)
        head = await self._versions.head()
        if head is not None and head.version > self._seen:
            self._returns_at = head.version
            return head
        self.returning = False
        self.changed.set()
        return None

    async def _catch_up(self, announced: Announcement) -> None:
        served = self._served
        is_served = served is not None and self._commits.version == served.announced.version
        if served is not None and is_served and is_same(served.announced, announced):
            await self._check(Staged(announced, None))
            await self._commits.rename(announced.version)
            renamed = replace(served, announced=announced)
            self._held[announced.id] = renamed
            self._serves(renamed, previous=self._previous)
            return
        staged = await self._fetched(announced)
        pause_s = await self._commits.commit(weights_of(staged), announced.restarts)
        self._serves(staged, previous=self._served)
        self.progress.pause_s = round(pause_s, 3)
        log.info(
            "weights.committed",
            version=announced.id,
            kind=announced.kind.value,
            fetch_s=staged.seconds,
            pause_s=self.progress.pause_s,
            bytes=staged.bytes,
            peer_bytes=staged.peer_bytes,
        )

    async def _fetched(self, announced: Announcement) -> Staged:
        """Fetch, verify and check; nothing is fetched twice."""
        await self._check(Staged(announced, None))
        staged = self._held.get(announced.id)
        if staged is None:
            self.progress.fetching = announced.id
            try:
                # The trainer keeps the files of a version that a server says it fetches.
                await self._report()
                staged = await self._fetcher.fetch(announced, self._held)
            except (OSError, ProtocolViolation) as error:
                raise NotFetched(f"policy version {announced.id}: {error}") from error
            finally:
                self.progress.fetching = ""
            self._held[announced.id] = staged
            self.progress.staged = announced.id
            self.progress.fetch_s, self.progress.bytes = staged.seconds, staged.bytes
            self.progress.peer_bytes = staged.peer_bytes
            await self._fetcher.offer(staged)
        await self._check(staged)
        return staged

    def _serves(self, staged: Staged, previous: Staged | None = None) -> None:
        self._held[staged.announced.id] = staged
        self._served, self._previous = staged, previous
        self._seen = staged.announced.version
        # A version that was announced before the absence does not end it.
        self.returning &= self._returns_at is None or self._seen < self._returns_at
        self._overdue = False
        self.changed.set()
        self.progress.reason = self.progress.refused = self.progress.lacks = ""

    def _failed(self, announced: Announcement, error: NotFetched) -> None:
        if str(error) != self.progress.reason:  # log it once
            event = "staging.full" if isinstance(error, StagingFull) else "weights.not_fetched"
            log.error(event, version=announced.id, reason=str(error))
        self.progress.reason, self.progress.lacks = str(error), announced.id
        self._overdue |= isinstance(error, FetchOverdue)

    async def _tidy(self) -> None:
        """Delete copies that are neither served, nor the previous ones, nor in use."""
        kept = {s.directory for s in (self._served, self._previous) if s is not None}
        used = self._commits.in_use()
        for number, staged in list(self._held.items()):
            directory = staged.directory
            if directory in kept or (directory is not None and directory.name in used):
                continue
            del self._held[number]
            await self._fetcher.discard(staged)

    async def _watch_head(self) -> None:
        """Note newer versions also while an older one is fetched, for `behind`. Without an answer
        from Redis, the trainer may have gone on without this server."""
        clock = asyncio.get_running_loop().time
        answered_at = clock()
        while True:
            with contextlib.suppress(ProtocolViolation):
                head, known = await self._versions.head(), self.progress.head
                if head is not None and (known is None or head.version > known.version):
                    self.progress.head = head
                    self.changed.set()
                if (group := await self._versions.group()) != self.progress.group:
                    self.progress.group = group
                    self.changed.set()
            away_s, answered_at = clock() - answered_at, clock()
            if away_s > ABSENT_AFTER_S:
                log.warning("redis.returned", away_s=round(away_s, 1))
                self.returned()
            await asyncio.sleep(TICK_S)

    async def _tick_for_ever(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            self._check_absence()
            self._ticked_at = clock()
            await asyncio.sleep(TICK_S)

    def _check_absence(self) -> None:
        """After a stop of this process, for example with SIGSTOP, others count it as gone."""
        if self._ticked_at is None:
            return
        now = asyncio.get_running_loop().time()
        if now - self._ticked_at > ABSENT_AFTER_S:
            log.warning("server.returned", away_s=round(now - self._ticked_at, 1))
            self._ticked_at = now
            self.returned()


def is_same(served: Announcement, announced: Announcement) -> bool:
    """Whether the weights are the same under another name."""
    if served.kind is VersionKind.BASE or announced.kind is VersionKind.BASE:
        return served.kind is announced.kind
    return served.digest == announced.digest != ""


def steps_between(served: PolicyVersion, head: PolicyVersion) -> int:
    """How many steps older the served weights are; at least 1 if another trainer made them."""
    return max(head.step - served.step, int(head.epoch > served.epoch))


def weights_of(staged: Staged) -> WeightRef:
    announced = staged.announced
    kind, path = announced.kind.weights, staged.directory
    return WeightRef(version=announced.version, kind=kind, path=path)
