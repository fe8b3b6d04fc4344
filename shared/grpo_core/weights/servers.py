"""What each inference server of a run reports about itself once a second.

The keys have the run's prefix:

    servers             set: the names of all servers that the run ever had and that did not leave
    server:<name>       hash: the server's `ServerStatus`; expires when the server is gone
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from grpo_core.redis.keys import run_prefix
from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_core.weights.versions import VersionedRecord

REPORT_EVERY_S = 1.0
GONE_AFTER_S = 10.0
"""After this long without a report, a server is gone."""
ABSENT_AFTER_S = 5.0
"""After this long without running, a server counts itself as gone: before others do, so that none
samples with old weights while the trainer has gone on without it."""


def servers_key(run_id: str) -> str:
    return run_prefix(run_id) + "servers"


def server_key(run_id: str, name: str) -> str:
    return run_prefix(run_id) + f"server:{name}"


class ServerState(StrEnum):
    """`state` of a `ServerStatus`: of the server with all its engines.

    starting ─▶ joining ─▶ serving ⇄ committing       new weights are loaded into the engine
                           serving ─▶ draining ─▶ restarting ─▶ serving   or the engine restarts
                           serving ─▶ restarting      after a crash, or after a failed commit
                           serving ⇄ behind           its weights are too old
    """

    STARTING = "starting"
    """The first engine has not started yet."""
    JOINING = "joining"
    """It fetches the newest version before its first engine starts, or waits for a source."""
    SERVING = "serving"
    COMMITTING = "committing"
    """The engine is paused and loads a version that lies, verified, in memory or on disk."""
    DRAINING = "draining"
    """New requests wait; requests in flight finish."""
    RESTARTING = "restarting"
    """No engine is running; new connections wait in the listening socket's queue."""
    BEHIND = "behind"
    """Its weights are older than it may serve. Every request that generates gets 503."""
    FAILED = "failed"
    """No engine is running, and only a new version starts one. Every request gets 503."""


class EngineState(StrEnum):
    """`state` of `GET /bridge/info`. The supervisor reports its own, `ServerState`."""

    SERVING = "serving"
    PAUSED = "paused"
    """A trainer writes weights. Requests in flight wait until its lease ends."""
    AWAITING_WEIGHTS = "awaiting_weights"
    """The engine does not hold the run's weights: it restarted during a run, or a trainer ended
    while it wrote."""
    FAILED = "failed"
    """No trainer wrote the run's weights back before the deadline. One may still do so."""
    SLEEPING = "sleeping"
    BEHIND = "behind"
    """The weights may be older than those that the trainer announced last."""


class ServerStatus(VersionedRecord):
    """`epoch` and `step`: the version that is served, or that a starting engine will serve.

    Example of a server that serves [1, 4] and fetches [1, 5]: `{"name": "gpu3-9001", "url":
    "http://gpu3:9001", "weights_url": "http://gpu3:10001", "state": "serving", "epoch": 1, "step":
    4, "fetching": "1-5", "in_use": "1-3 1-4", …}`.
    """

    name: str
    url: str = ""
    """URL of the public port, as other hosts reach it."""
    weights_url: str = ""
    """URL below which other servers fetch weights from this one; "" if they cannot."""
    state: ServerState
    kind: WeightKind = WeightKind.BASE
    path: str = ""
    """Directory of the served weights on the server's host."""
    dtype: str = ""
    """Data type of the engine's weights; "" before the first engine."""
    device: str = ""
    """For example "cpu" or "cuda"."""
    workers: int = 0
    """That can join a process group of the trainer; 0 if they cannot."""
    reason: str = ""
    """Why no weights are served, or the newest version is not."""
    fetching: str = ""
    """Id of the version that is being fetched."""
    in_use: str = ""
    """Ids of the versions whose files the server may still read, separated by spaces."""
    refused: str = ""
    """Id of a version that this server cannot serve; `reason` says why."""
    lacks: str = ""
    """Id of a version for which no source was left. The trainer then writes its files."""
    shares_weights: bool = False
    """A trainer writes the weights in place."""
    fetch_s: float = 0.0
    """Of the last commit: seconds to fetch and verify it, and seconds of the pause; `bytes` that it
    fetched, of which `peer_bytes` came from other servers."""
    pause_s: float = 0.0
    bytes: int = 0
    peer_bytes: int = 0
    wrong_chunks: int = 0
    """Chunks with a wrong digest since the start; each was fetched again from another source."""
    restarts: int = 0
    """Engine starts after the first one, for new weights or after a crash."""
    crashes: int = 0
    torn: int = 0
    """Commits that failed half-way; each ended the engine."""
    failed_sources: int = 0
    """Sources that did not answer, or not with the whole file, since the start."""
    dropped_requests: int = 0
    """Requests aborted at the end of a drain."""
    generation_tokens: int = 0
    """Tokens sampled by all engines of this server, counted by vLLM."""
    engine_pid: int = 0
    started: float = 0.0
    """Unix time in seconds at which this server started: another one of this name has another."""
    time: float = 0.0
    """Unix time in seconds, by the server's clock."""

    @property
    def weights(self) -> WeightRef:
        """The served weights, without a digest."""
        path = Path(self.path) if self.path else None
        return WeightRef(version=self.version, kind=self.kind, path=path)

    @property
    def serves(self) -> bool:
        """Whether it answers requests now, or in a moment."""
        return self.state in (ServerState.SERVING, ServerState.COMMITTING)

    @property
    def versions_in_use(self) -> frozenset[str]:
        return frozenset([*self.in_use.split(), *([self.fetching] if self.fetching else [])])


def in_use_of(servers: Iterable[ServerStatus]) -> frozenset[str]:
    """Ids of all versions that one of the servers reads or fetches."""
    return frozenset().union(*(server.versions_in_use for server in servers))
