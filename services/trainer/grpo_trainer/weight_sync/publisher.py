"""Announces a version, and waits until the inference servers serve it."""

from __future__ import annotations

from dataclasses import dataclass, field

import structlog

from grpo_core.deadline import Deadline
from grpo_core.weights.servers import in_use_of
from grpo_core.weights.versions import Announcement
from grpo_trainer.errors import NotPublished, WeightsRefused
from grpo_trainer.weight_sync.base import POLL_S, Reach
from grpo_trainer.weight_sync.servers import Servers, ServerWatch, described, serves_now

log = structlog.get_logger()


@dataclass(frozen=True)
class Publication:
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

    def publish(self, announced: Announcement, sources: list[str]) -> Publication:
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
            done = {name: one for name, one in servers.items() if serves_now(one, announced)}
            passed_s = watch.clock() - began
            if done and first_s is None:
                first_s = passed_s
            pending = (expected & servers.keys()) - done.keys() - refused
            if done and first_s is not None and (not pending or wait.has_passed):
                if pending:
                    self._log_late(announced, pending, servers)
                reach = Reach(len(done), announced.bytes, first_s, None if pending else passed_s)
                return Publication(reach, done, in_use_of(servers.values()))
            if deadline.has_passed and not done:
                raise NotPublished(
                    f"policy version {tuple(announced.version)} is not served after "
                    f"{self.deadline_s:g} s ({described(servers.values())}). Read the server's "
                    "log; if the server only needs more time, raise --publish-deadline-s. Then "
                    "start the trainer again"
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
