"""One server of the pool: its requests, the task that probes it, and what run-api says about it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog

from grpo_core.clients.inference import GenerateAnswer, GenerationClient
from grpo_core.errors import GrpoError, RequestRefused
from grpo_core.weights.servers import ServerState
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.run_api import ListedServer
from grpo_env.inference.health import ANSWERING, HealthClient, PoolState, ServerStanding
from grpo_env.inference.places import Place

log = structlog.get_logger()

_PROBE_EVERY_S = 2.0
_NOT_FOUND = 404
_MAX_LAG = 10
_OPEN = frozenset({ServerState.SERVING, ServerState.COMMITTING})
_WAITING = frozenset({ServerState.DRAINING, ServerState.RESTARTING})
"""Requests wait at the server for its engine."""


class NoGenerateRoute(GrpoError):
    """The server at `--inference-url` has no route `POST /generate`."""


@dataclass(eq=False)
class PooledServer(ServerStanding):
    """One server of the pool, with the task that probes it.

    `load`: number of sequences that are being sampled; `picked_at`: rank of its newest request
    among those of the pool; `probed`: set after the first probe; `is_named`: by `--inference-url`;
    `listed`: its entry in the newest list of run-api; `has_left`: run-api has listed it, and lists
    it no more; `answered`: requests by policy version.
    """

    place: Place
    generation: GenerationClient
    health: HealthClient
    is_named: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self.load = self.picked_at = 0
        self.probed = asyncio.Event()
        self.listed: ListedServer | None = None
        self.answered: Counter[PolicyVersion] = Counter()
        self._newest_answer: PolicyVersion | None = None
        self.has_left = False
        self._in_flight: set[asyncio.Timeout] = set()
        self._probe_now = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    def start(self, on_end: Callable[[asyncio.Task[None]], None]) -> None:
        """Begin to probe. `on_end`: called with the task when it ends."""
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(on_end)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self.health.close()
        await self.generation.close()

    @property
    def name(self) -> str:
        """ "" if it is unknown."""
        return self.listed.name if self.listed else self.health.name or ""

    def ask_name(self) -> None:
        """With the next probe, which follows soon."""
        if not self.health.asks_name:
            self.health.asks_name = True
            self._probe_now.set()

    def take(self, is_named: bool, listed: ListedServer | None) -> None:
        """Take whether `--inference-url` names it, and its entry in the newest list of run-api;
        None if it has none."""
        was_member = self._is_member
        if listed is not None and self.listed is None:
            self._newest_answer = None  # it may have restarted
        self.has_left = listed is None and (self.has_left or self.listed is not None)
        self.is_named, self.listed = is_named, listed
        if self._is_member is not was_member:
            event = "server.left" if was_member else "server.joined"
            version = None if self.version is None else tuple(self.version)
            log.info(event, url=self.url, version=version)

    @property
    def _is_member(self) -> bool:
        return not (self.has_left or self.is_forgotten)

    @property
    def is_forgotten(self) -> bool:
        """Whether nothing names it any more."""
        return not self.is_named and self.listed is None

    @property
    def state(self) -> PoolState:
        """Its standing, unless run-api tells that it does not answer at once."""
        listed = ServerState.SERVING if self.listed is None else self.listed.state
        if self.standing is PoolState.GONE or (listed in _OPEN and not self.has_left):
            return self.standing
        return PoolState.UPDATING if listed in _WAITING else PoolState.CLOSED

    @property
    def version(self) -> PolicyVersion | None:
        """The newest version that it is known to serve; None if it is not listed."""
        if self.listed is None:
            return None
        return max(self.listed.version, self._newest_answer or self.listed.version)

    def lag(self, newest: PolicyVersion | None) -> int:
        """Steps between its version and the newest one, up to a limit."""
        own = self.version
        if own is None or newest is None:
            return 0
        return min(newest.step - own.step, _MAX_LAG) if newest.epoch == own.epoch else _MAX_LAG

    def log_requests(self) -> None:
        """Log how many requests it has answered with each policy version."""
        versions = {str(version): count for version, count in sorted(self.answered.items())}
        total = self.answered.total()
        log.info("server.requests", url=self.url, requests=total, versions=versions)

    async def generate(
        self, prompt_token_ids: list[int], within_s: float, sampling: dict[str, Any]
    ) -> GenerateAnswer:
        """Sample completions, as `GenerationClient.generate`.

        Raises:
            TimeoutError: `abort_requests` ended the request.
            NoGenerateRoute: the server has no such route.
        """
        sequences = sampling.get("n", 1)
        self.load += sequences
        try:
            async with asyncio.timeout(None) as until_aborted:
                self._in_flight.add(until_aborted)
                answer = await self.generation.generate(prompt_token_ids, within_s, **sampling)
        except RequestRefused as error:
            if error.status == _NOT_FOUND:
                raise NoGenerateRoute(
                    f"404 Not Found on /generate at {self.url} (stock vLLM has no /generate); "
                    "start vllm-api-server, or check --inference-url"
                ) from error
            raise
        finally:
            self._in_flight.discard(until_aborted)
            self.load -= sequences
        self.request_answered()
        if answer.policy_version:
            self._newest_answer = max(last for _, last in answer.policy_version)
            self.answered[self._newest_answer] += 1
        return answer

    def abort_requests(self) -> None:
        """End the requests in flight."""
        now = asyncio.get_running_loop().time()
        for until_aborted in self._in_flight:
            until_aborted.reschedule(now)
        self._in_flight.clear()

    def request_failed(self, error: Exception) -> None:
        """Record it as the base class does, and probe soon."""
        super().request_failed(error)
        self._probe_now.set()

    async def _watch(self) -> None:
        """Probe the server for ever. Raises the errors of `HealthClient.problem`."""
        while True:
            began_at = self.clock()
            self.record_probe(await self.health.problem(), began_at)
            self.probed.set()
            if self.standing is PoolState.GONE:
                self.health.name = None  # another server may start here
            if self.standing in ANSWERING:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_PROBE_EVERY_S):
                        await self._probe_now.wait()
            self._probe_now.clear()
            if self.standing not in ANSWERING:
                await asyncio.sleep(self.recheck_s)


@dataclass
class Home:
    """The server of one conversation: the one of its first answer, even while it restarts.

    So every turn finds its prefix in that server's cache, and only an update of the server changes
    the policy. Another server takes over only if it is gone, or if its policy is too old.
    """

    server: PooledServer | None = None
