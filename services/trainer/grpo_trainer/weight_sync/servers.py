"""Watches the inference servers that follow the run's versions, by what they report in Redis, and
announces versions to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import structlog

from grpo_core.deadline import Deadline
from grpo_core.weights.servers import REPORT_EVERY_S, ServerState, ServerStatus, in_use_of
from grpo_core.weights.version_log import VersionLog
from grpo_core.weights.versions import Announcement
from grpo_trainer.errors import LostServer, NoInferenceServer, NotPublished, WeightsRefused
from grpo_trainer.weight_sync.base import POLL_S, Incidents, Reach

log = structlog.get_logger()

NONE_REPORTS = (
    "none reports a status in Redis: none has started, or with another --redis-url or --run-id, or "
    "it is of another release"
)
Clock = Callable[[], float]
Servers = dict[str, ServerStatus]
"""By name."""


class ServerWatch:
    """Args:
    versions: of the run
    return_deadline_s: how long all servers may be down before `LostServer`

    `known`: the servers at the last look. `left`, `repeated`, `unanswered`, `by_files`: as in
    `Incidents`, but since the start. `on_lack`: called with the names of servers that find no
    source of the newest version.
    """

    def __init__(
        self,
        versions: VersionLog,
        return_deadline_s: float,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.versions = versions
        self.clock = clock
        self.sleep = sleep
        self.left = self.repeated = self.unanswered = self.by_files = 0
        self.on_lack: Callable[[list[str]], None] = lambda _: None
        self._told = (0, 0, 0, 0)
        self.return_deadline_s = return_deadline_s
        self._return_deadline: Deadline | None = None
        self.known: Servers = {}
        self._checked: dict[str, tuple[float, int]] = {}
        self._looked_at = float("-inf")
        self._announced: Announcement | None = None
        self._sources: list[str] = []

    def announce(self, announced: Announcement, sources: list[str]) -> None:
        """Announce the version in Redis. Raises `TrainerReplaced`, `ServiceUnavailable`."""
        self._sources = sources
        self.versions.announce(announced, sources)
        self._announced = announced

    def servers(self) -> Servers:
        """Those that report now. Logs who came and who left."""
        found = {server.name: server for server in self.versions.servers()}
        self._looked_at = self.clock()
        for name in found.keys() - self.known.keys():
            log.info("server.joined", server=name, url=found[name].url)
        for name in self.known.keys() - found.keys():
            self.left += 1
            log.warning("server.left", server=name, url=self.known[name].url)
        self.known = found
        newest = None if self._announced is None else self._announced.id
        if lacking := sorted(name for name, server in found.items() if server.lacks == newest):
            self.on_lack(lacking)
        return found

    def confirm(self) -> None:
        """Announce the newest version again if Redis lost it.

        Raises:
            TrainerReplaced: another trainer has announced a newer one.
        """
        if self._announced is None or self.versions.head() == self._announced:
            return
        self.versions.announce(self._announced, self._sources)
        self.repeated += 1
        log.warning(
            "announcement.repeated",
            policy_version=tuple(self._announced.version),
            reason="Redis has lost it: it was flushed, or restarted without its data",
        )

    def look(self) -> None:
        """Wait for the return of a server if none serves. Checks at most once a second.

        Raises:
            LostServer: none came back in time.
            TrainerReplaced: another trainer publishes to this run.
            ServiceUnavailable: Redis does not answer for longer than the deadline.
        """
        if self.clock() - self._looked_at >= REPORT_EVERY_S:
            self.await_serving()

    def await_serving(self) -> Servers:
        """Those that serve, once there is one. Raises the errors of `look`."""
        waited = False
        while True:
            self.confirm()
            servers = self.servers()
            serving = {name: one for name, one in servers.items() if one.serves}
            self.note(servers, is_up=bool(serving))
            if serving:
                if waited:
                    log.info("server.available_again", servers=sorted(serving))
                return serving
            if not waited:
                log.warning("server.unavailable", reason=described(servers.values()))
                waited = True
            self.sleep(POLL_S)

    def await_all(self, count: int) -> Servers:
        """Those that serve, once they are this many.

        Raises:
            NoInferenceServer: they are fewer at the deadline.
        """
        deadline = Deadline(self.return_deadline_s, self.clock)
        while True:
            servers = self.servers()
            serving = {name: one for name, one in servers.items() if one.serves}
            if len(serving) >= count:
                return serving
            if deadline.has_passed:
                raise NoInferenceServer(
                    f"--num-inference-nodes {count}: after {self.return_deadline_s:g} s, "
                    f"{len(serving)} inference servers of run {self.versions.run_id!r} serve "
                    f"({described(servers.values())}). Start the others with the trainer's "
                    "--redis-url and --run-id, or raise --server-return-deadline-s"
                )
            self.sleep(POLL_S)

    def note(self, servers: Servers, is_up: bool) -> None:
        """Record whether there is a server.

        Raises:
            LostServer: there was none for longer than the deadline.
        """
        if is_up:
            self._return_deadline = None
        elif self._return_deadline is None:
            self._return_deadline = Deadline(self.return_deadline_s, self.clock)
        elif self._return_deadline.has_passed:
            raise LostServer(
                f"no inference server of run {self.versions.run_id!r} has served for "
                f"{self.return_deadline_s:g} s ({described(servers.values())}). Read its log, "
                "start it with the trainer's --redis-url and --run-id, then start the trainer again"
            )

    def incidents(self) -> Incidents:
        """Since the last call."""
        now = (self.left, self.repeated, self.unanswered, self.by_files)
        told, self._told = self._told, now
        return Incidents(*(after - before for after, before in zip(now, told, strict=True)))

    def unchecked(self, names: Iterable[str]) -> list[str]:
        """Those whose weights were not checked since they joined, or since their engine crashed."""
        return sorted(n for n in names if n in self.known and self._checked.get(n) != self._life(n))

    def checked(self, name: str) -> None:
        if name in self.known:
            self._checked[name] = self._life(name)

    def _life(self, name: str) -> tuple[float, int]:
        server = self.known[name]
        return server.started, server.crashes


def described(servers: Iterable[ServerStatus]) -> str:
    """Their states, for messages."""
    return "; ".join(map(_described, servers)) or NONE_REPORTS


def _described(server: ServerStatus) -> str:
    version = f" policy version {tuple(server.version)}" if server.serves else ""
    reason = f": {server.reason}" if server.reason else ""
    return f"{server.name} {server.state.value}{version}{reason}"


@dataclass(frozen=True)
class ServedPublication:
    """`serving`: the servers that serve the version, by name. `in_use`: ids of the versions that
    servers read or fetch."""

    reach: Reach
    serving: Servers
    in_use: frozenset[str]


@dataclass
class Publisher:
    """Args:
    watch: sees the servers
    wait_s: how long one server may delay a publication that others serve
    deadline_s: time for the first server to serve it

    `late`: number of servers for which a publication did not wait any longer.
    """

    watch: ServerWatch
    wait_s: float
    deadline_s: float
    late: int = field(init=False, default=0)

    def publish(self, announced: Announcement, sources: list[str]) -> ServedPublication:
        """Return once all servers that serve now serve the version or are gone, or after `wait_s`
        with at least one.

        Raises:
            WeightsRefused: every server refuses the weights.
            NotPublished: no server serves them at the deadline.
            LostServer: no server reports for longer than its deadline.
            TrainerReplaced: another trainer publishes to this run.
        """
        watch = self.watch
        expected = {name for name, server in watch.servers().items() if server.serves}
        began = watch.clock()
        wait, deadline = (Deadline(s, watch.clock) for s in (self.wait_s, self.deadline_s))
        watch.announce(announced, sources)
        first_s: float | None = None
        refused: set[str] = set()
        while True:
            servers = watch.servers()
            watch.note(servers, is_up=bool(servers))
            refused = self._refused(announced, servers, refused)
            done = {  # every request to these is answered by this version
                name: server
                for name, server in servers.items()
                if server.state is ServerState.SERVING and server.version == announced.version
            }
            passed_s = watch.clock() - began
            if done and first_s is None:
                first_s = passed_s
            pending = (expected & servers.keys()) - done.keys() - refused
            if done and first_s is not None and (not pending or wait.has_passed):
                if pending:
                    self._log_late(announced, pending, servers)
                reach = Reach(len(done), announced.bytes, first_s, None if pending else passed_s)
                return ServedPublication(reach, done, in_use_of(servers.values()))
            if deadline.has_passed and not done:
                raise NotPublished(
                    f"policy version {tuple(announced.version)} is not served after "
                    f"{self.deadline_s:g} s ({described(servers.values())}). Read the server's "
                    "log, or raise --publish-deadline-s, then start the trainer again"
                )
            watch.sleep(POLL_S)
            watch.confirm()

    def _refused(self, announced: Announcement, servers: Servers, known: set[str]) -> set[str]:
        """Names of the servers that refuse the version.

        Raises:
            WeightsRefused: none is left that does not.
        """
        reasons = {s.name: s.reason for s in servers.values() if s.refused == announced.id}
        if servers and reasons.keys() == servers.keys():
            told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise WeightsRefused(
                f"no inference server accepts policy version {tuple(announced.version)}: {told}. "
                "The servers keep serving the previous weights"
            )
        for name in reasons.keys() - known:
            log.warning(
                "publication.refused",
                server=name,
                policy_version=tuple(announced.version),
                reason=reasons[name],
            )
        return set(reasons)

    def _log_late(self, announced: Announcement, pending: set[str], servers: Servers) -> None:
        self.late += len(pending)
        log.warning(
            "publication.late",
            policy_version=tuple(announced.version),
            servers=described(servers[name] for name in sorted(pending)),
            hint=f"training goes on after {self.wait_s:g} s; see --publish-wait-s",
        )
