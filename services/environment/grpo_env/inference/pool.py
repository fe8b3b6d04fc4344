"""Sends each request to an inference server that is healthy: one that serves the newest policy, and
has little to do.

A server that restarts is waited for, a server that is gone is skipped. Each server has a task that
probes `GET /health`. Requests that find no server wait until a server's state changes.

Servers are those of `--inference-url`, and those that run-api lists. They come and go during a run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import httpx

from grpo_core.clients.inference import SERVICE, GenerateAnswer, GenerationClient
from grpo_core.clients.service import TransientAnswer, unavailable
from grpo_core.closing import ClosesOnAsyncExit
from grpo_core.deadline import Deadline
from grpo_core.errors import ServiceUnavailable
from grpo_core.service_url import ServiceUrl
from grpo_core.wire.run_api import ListedServer
from grpo_env.inference.health import ANSWERING, HealthClient, PoolState
from grpo_env.inference.places import Lookup, NamedServers, Place, addresses_of, place_key
from grpo_env.inference.server import Home, PooledServer

_GONE_AFTER_S = 120.0
"""A server that has not served for so long is gone. A restart takes less: a drain of up to 60 s and
the start of an engine."""
_FIRST_PROBES_S = 1.0
"""Limit on waiting for the first probes, so that the first requests use all healthy servers."""
_LOOK_UP_EVERY_S = 10.0
_TEND_EVERY_S = 1.0
ANY: frozenset[Place] = frozenset()


@dataclass(eq=False, repr=False)
class InferencePool(ClosesOnAsyncExit):
    """Samples completions on one or several servers. Use it in `async with`.

    Args:
        urls: with or without a trailing /v1.
        deadline_s: how long completions may take, including repeats and the wait for a server.
        max_requests: the largest number of requests in flight at one server.
        api_key: the servers' API key; None if they need none.
        clock: in seconds; measures deadlines and how long a server has not served.
        lookup: of the addresses of names.
        tokenizer: see `HealthClient`.

    `servers`: all that something names, or that still answer a request.
    """

    urls: Sequence[str]
    deadline_s: float
    max_requests: int
    api_key: str | None = None
    clock: Callable[[], float] = time.monotonic
    lookup: Lookup = addresses_of
    tokenizer: Any = None

    def __post_init__(self) -> None:
        self._named = NamedServers(self.urls, self.lookup)
        self.servers: list[PooledServer] = []
        self._picks = 0
        self._changed = asyncio.Event()
        self._tending: asyncio.Task[None] | None = None
        self._unusable: BaseException | None = None

    async def __aenter__(self) -> Self:
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_PROBES_S):
                await self._named.look_up()
        self._take_names()
        self._tending = asyncio.create_task(self._tend())
        self._tending.add_done_callback(self._task_ended)
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_PROBES_S):
                for server in self.servers:
                    await server.probed.wait()
        return self

    async def generate(
        self,
        prompt_token_ids: list[int],
        home: Home | None = None,
        only: frozenset[Place] = ANY,
        **sampling: Any,
    ) -> GenerateAnswer:
        """Sample completions: repeats `GenerationClient.generate` until a server answers.

        Args:
            home: of the conversation that the request belongs to
            only: the servers to use; if they are all gone, or there are none, all servers

        Raises:
            ServiceUnavailable: no server answered within the deadline; or all that are healthy
                answered with a status 5xx that a repeat would not change.
            NoGenerateRoute: the server has no such route.
            SharedWeightsHaveOneServer: one of several servers shares its weights with a trainer.
            ServerTokenizerDiffers: a server has another tokenizer than the environment.
        """
        home = home or Home()
        deadline = Deadline(self.deadline_s, self.clock)
        broken: set[PooledServer] = set()
        while True:
            server = await self._next_server(home.server, only, broken, deadline)
            try:
                answer = await server.generate(prompt_token_ids, deadline.left_s, sampling)
            except TimeoutError:
                continue  # the server is gone, and another one serves
            except httpx.ReadTimeout as error:
                server.request_failed(error)
                raise unavailable(SERVICE, server.url, deadline.seconds, error) from error
            except (httpx.TransportError, TransientAnswer) as error:
                server.request_failed(error)
            except ServiceUnavailable as error:
                server.request_failed(error)
                broken.add(server)
                if not self._candidates(home.server, only, broken):
                    raise
            else:
                home.server = server
                return answer

    async def close(self) -> None:
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.gather(self._tending, return_exceptions=True)
        await asyncio.gather(*(server.close() for server in self.servers))

    @property
    def places(self) -> list[Place]:
        """The servers that may answer now; all if there are none."""
        present = [s.place for s in self._members() if s.standing is not PoolState.GONE]
        return present or [server.place for server in self.servers]

    def follow(self, listed: Sequence[ListedServer]) -> None:
        """Take run-api's newest list of the run's servers.

        An empty list says nothing: Redis may have lost its data.
        """
        if not listed:
            return
        by_place = {server.place.key: server for server in self.servers}
        # A server that only the list names may have moved, so the URL decides.
        by_name = {
            server.name: server
            for server in self.servers
            if server.is_named and server.name and server.standing is not PoolState.GONE
        }
        entries: dict[PooledServer, ListedServer] = {}
        missing: list[ListedServer] = []
        for entry in listed:
            known = by_place.get(place_key(entry.url)), by_name.get(entry.name)
            if any(known):
                entries |= {server: entry for server in known if server}
            else:
                missing.append(entry)
        # A missing server may be one of these, under another URL.
        unknown = [
            server
            for server in self.servers
            if server.standing is PoolState.SERVING
            and server.health.name is None
            and server not in entries
        ]
        for server in unknown:
            server.ask_name()
        if not unknown:
            entries |= {self._add(Place(ServiceUrl(entry.url))): entry for entry in missing}
        for server in self.servers:
            server.take(server.is_named, entries.get(server))
        self._standing_changed()

    def _add(self, place: Place, others: int = 0, is_named: bool = False) -> PooledServer:
        server = PooledServer(
            str(place),
            # Half of the deadline remains for another server.
            min(_GONE_AFTER_S, self.deadline_s / 2),
            self._standing_changed,
            self.clock,
            place,
            GenerationClient(
                SERVICE,
                place.url,
                self.deadline_s,
                timeout_s=self.deadline_s,
                max_connections=self.max_requests,
                token=self.api_key,
                address=place.address,
            ),
            HealthClient(place, others, self.api_key, tokenizer=self.tokenizer),
            is_named,
        )
        self.servers.append(server)
        server.start(self._task_ended)
        return server

    def _take_names(self) -> None:
        """Take the newest addresses of the names in `--inference-url`."""
        places, known = self._named.places, {server.place for server in self.servers}
        for server in self.servers:
            server.take(server.place in places, server.listed)
        for place in places:
            if place not in known:
                self._add(place, len(self.urls) - 1, is_named=True)
        self._standing_changed()

    async def _tend(self) -> None:
        """Look names up for ever, and close servers that nothing names any more."""
        looked_up_at = self.clock()
        left: set[PooledServer] = set()
        while True:
            await asyncio.sleep(_TEND_EVERY_S)
            serves = any(server.standing in ANSWERING for server in self._members())
            if not serves or self.clock() - looked_up_at >= _LOOK_UP_EVERY_S:
                looked_up_at = self.clock()
                await self._named.look_up()
                self._take_names()
            # The lists of two run-api processes differ for a second: its requests may go on.
            left_before, left = left, {server for server in self.servers if server.has_left}
            self._repeat_elsewhere(left & left_before)
            for server in [s for s in self.servers if s.is_forgotten and not s.load]:
                self.servers.remove(server)
                server.log_requests()
                await server.close()

    async def _next_server(
        self,
        home: PooledServer | None,
        only: frozenset[Place],
        broken: set[PooledServer],
        deadline: Deadline,
    ) -> PooledServer:
        """The best candidate. Waits until there is one. Raises `ServiceUnavailable`: there was none
        within the deadline."""
        assert self._tending, "enter the pool with `async with` first"
        while not deadline.has_passed:
            if self._unusable is not None:
                raise self._unusable
            if candidates := self._candidates(home, only, broken):
                return self._pick(candidates)
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline.left_s):
                    await self._changed.wait()
        reasons = "; ".join(f"{server.url}: {server.reason}" for server in self.servers)
        raise ServiceUnavailable(
            f"{SERVICE}: no server answered within {deadline.seconds:g} s ({reasons}); check that "
            "the servers run, and --inference-url"
        )

    def _pick(self, candidates: Collection[PooledServer]) -> PooledServer:
        """The least loaded one. Each step that a server is behind the newest doubles its load.

        If the newest always came first, the others would be idle while a version spreads.
        """
        newest = max((s.version for s in candidates if s.version is not None), default=None)
        server = min(candidates, key=lambda s: ((s.load + 1) << s.lag(newest), s.picked_at))
        self._picks += 1
        server.picked_at = self._picks  # servers with equal loads take turns
        return server

    def _candidates(
        self, home: PooledServer | None, only: frozenset[Place], broken: set[PooledServer]
    ) -> list[PooledServer]:
        """The servers to which a request may go now.

        Args: broken: those that answered the request with an error that a repeat would meet
        """
        members = self._members()
        if len(members) > 1:  # else nobody could take the requests, so the only server holds them
            here = [s for s in members if s.state not in (PoolState.GONE, PoolState.CLOSED)]
            members = [home] if home in here else [s for s in here if s.place in only] or here
        left = [server for server in members if server not in broken]
        return _healthy([s for s in left if s.state in ANSWERING]) or _healthy(left)

    def _members(self) -> list[PooledServer]:
        """All servers that something names, each once even if it has several URLs."""
        named = [server for server in self.servers if not server.is_forgotten]
        return [*{s.name or s.url: s for s in reversed(named)}.values()][::-1]

    def _standing_changed(self) -> None:
        """Wake the requests that wait for a server, and those that a server holds that is gone."""
        self._changed.set()
        self._changed.clear()
        self._repeat_elsewhere(s for s in self.servers if s.standing is PoolState.GONE)

    def _repeat_elsewhere(self, lost: Iterable[PooledServer]) -> None:
        """End the requests in flight at these servers, if another one serves."""
        if any(server.state is PoolState.SERVING for server in self.servers):
            for server in lost:
                server.abort_requests()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._unusable = task.exception()
            self._standing_changed()

    def log_requests(self) -> None:
        """Log how many requests each server has answered, by policy version."""
        for server in self.servers:
            server.log_requests()


def _healthy(servers: Sequence[PooledServer]) -> list[PooledServer]:
    serving = [server for server in servers if server.standing is PoolState.SERVING]
    on_trial = [server for server in servers if server.standing is PoolState.ON_TRIAL]
    # A server that fails at once is always the least loaded, so it is tried by one request.
    return [server for server in on_trial if not server.load] or serving or on_trial
