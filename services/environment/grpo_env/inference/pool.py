"""Sends each request to the least loaded inference server that is healthy.

A server that restarts is waited for, a server that is gone is skipped. One task per server probes
`GET /health`. Requests that find no server wait until a server's standing changes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Self

import httpx

from grpo_core.clients.inference import SERVICE, GenerateAnswer, GenerationClient
from grpo_core.clients.service import TransientAnswer, unavailable
from grpo_core.closing import ClosesOnAsyncExit
from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError, RequestRefused, ServiceUnavailable
from grpo_env.inference.health import HealthClient, ServerStanding, Standing

_GONE_AFTER_S = 120.0
"""A server that has not served for so long is gone. A restart takes less: a drain of up to 60 s and
the start of an engine."""
_FIRST_PROBES_S = 1.0
"""Limit on waiting for the first probes, so that the first requests use all healthy servers."""
_PROBE_EVERY_S = 2.0
_NOT_FOUND = 404


class NoGenerateRoute(GrpoError):
    """The server at `--inference-url` has no route `POST /generate`."""


class PooledServer(ServerStanding):
    """One server of the pool, with the task that probes it.

    `load`: number of sequences that are being sampled; `picked_at`: rank of its newest request
    among those of the pool; `probed`: set after the first probe.
    """

    def __init__(
        self,
        generation: GenerationClient,
        health: HealthClient,
        gone_after_s: float,
        on_change: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(generation.base_url, gone_after_s, on_change, clock)
        self.load = self.picked_at = 0
        self.probed = asyncio.Event()
        self._generation = generation
        self._health = health
        self._in_flight: set[asyncio.Timeout] = set()
        self._request_failed = asyncio.Event()

    async def close(self) -> None:
        await self._health.close()
        await self._generation.close()

    async def generate(
        self, prompt_token_ids: list[int], within_s: float, sampling: dict[str, Any]
    ) -> GenerateAnswer:
        """As `GenerationClient.generate`.

        Raises:
            TimeoutError: `abort_requests` ended the request.
            NoGenerateRoute: the server has no such route.
        """
        sequences = sampling.get("n", 1)
        self.load += sequences
        try:
            async with asyncio.timeout(None) as until_aborted:
                self._in_flight.add(until_aborted)
                answer = await self._generation.generate(prompt_token_ids, within_s, **sampling)
        except RequestRefused as error:
            if error.status == _NOT_FOUND:
                raise NoGenerateRoute(
                    f"404 Not Found on /generate at {self.url}: this server is not "
                    "vllm-api-server (stock vLLM has no /generate); start vllm-api-server, or "
                    "check --inference-url"
                ) from error
            raise
        finally:
            self._in_flight.discard(until_aborted)
            self.load -= sequences
        self.request_answered()
        return answer

    def abort_requests(self) -> None:
        """End the requests in flight."""
        now = asyncio.get_running_loop().time()
        for until_aborted in self._in_flight:
            until_aborted.reschedule(now)
        self._in_flight.clear()

    def request_failed(self, error: Exception) -> None:
        """As in the base class. A probe follows soon."""
        super().request_failed(error)
        self._request_failed.set()

    async def watch(self) -> None:
        """Probe the server for ever.

        Raises:
            SharedWeightsHaveOneServer: a trainer writes the server's weights in place, and the
                pool has other servers.
        """
        while True:
            began_at = self._clock()
            self.record_probe(await self._health.problem(), began_at)
            self.probed.set()
            if self.gets_requests:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_PROBE_EVERY_S):
                        await self._request_failed.wait()
            self._request_failed.clear()
            if not self.gets_requests:
                await asyncio.sleep(self.recheck_s)


class InferencePool(ClosesOnAsyncExit):
    """Samples completions on one or several servers. Use it in `async with`.

    Args:
        urls: with or without a trailing /v1.
        deadline_s: how long completions may take, including repeats and the wait for a server.
        max_requests: the largest number of requests in flight at one server.
        api_key: the servers' API key; None if they need none.
        clock: in seconds; measures deadlines and how long a server has not served.
    """

    def __init__(
        self,
        urls: Sequence[str],
        deadline_s: float,
        max_requests: int,
        api_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.deadline_s = deadline_s
        self.clock = clock
        self._servers = [
            PooledServer(
                GenerationClient(url, deadline_s, max_requests, api_key),
                HealthClient(url, others=len(urls) - 1, api_key=api_key),
                # Half of the deadline remains for another server.
                min(_GONE_AFTER_S, deadline_s / 2),
                self._standing_changed,
                clock,
            )
            for url in urls
        ]
        self._picks = 0
        self._changed = asyncio.Event()
        self._watches: list[asyncio.Task[None]] = []
        self._unusable: BaseException | None = None

    async def __aenter__(self) -> Self:
        for server in self._servers:
            watch = asyncio.create_task(server.watch())
            watch.add_done_callback(self._watch_ended)
            self._watches.append(watch)
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_PROBES_S):
                for server in self._servers:
                    await server.probed.wait()
        return self

    def session(self) -> Conversation:
        """For the requests of one conversation."""
        return Conversation(self)

    async def generate(self, prompt_token_ids: list[int], **sampling: Any) -> GenerateAnswer:
        """As `GenerationClient.generate`, repeated until a server answers.

        Raises:
            ServiceUnavailable: no server answered within the deadline; or all that are healthy
                answered with a status 5xx that a repeat would not change.
            NoGenerateRoute: the server has no such route.
            SharedWeightsHaveOneServer: one of several servers shares its weights with a trainer.
        """
        return await self.session().generate(prompt_token_ids, **sampling)

    async def close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        async with AsyncExitStack() as stack:
            for server in self._servers:
                stack.push_async_callback(server.close)

    async def next_server(
        self, home: PooledServer | None, broken: set[PooledServer], deadline: Deadline
    ) -> PooledServer:
        """The least loaded candidate. Waits until there is one.

        Args: as `candidates`

        Raises:
            ServiceUnavailable: there was none within the deadline.
        """
        assert self._watches, "enter the pool with `async with` first"
        while not deadline.has_passed:
            if self._unusable is not None:
                raise self._unusable
            if candidates := self.candidates(home, broken):
                server = min(candidates, key=lambda s: (s.load, s.picked_at))
                self._picks += 1
                server.picked_at = self._picks  # servers with equal loads take turns
                return server
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline.left_s):
                    await self._changed.wait()
        reasons = "; ".join(f"{server.url}: {server.reason}" for server in self._servers)
        raise ServiceUnavailable(
            f"{SERVICE}: no server answered within {deadline.seconds:g} s ({reasons}); check that "
            "the servers run, and --inference-url"
        )

    def candidates(
        self, home: PooledServer | None, broken: set[PooledServer]
    ) -> list[PooledServer]:
        """The servers to which a request may go now.

        Args:
            home: the only server to use, unless it is gone; None for any
            broken: the servers that answered the request with an error that a repeat would meet
        """
        servers = [home] if home and home.standing is not Standing.GONE else self._servers
        serving = [s for s in servers if s.standing is Standing.SERVING and s not in broken]
        on_trial = [s for s in servers if s.standing is Standing.ON_TRIAL and s not in broken]
        # A server that fails at once is always the least loaded, so it is tried by one request.
        return [s for s in on_trial if not s.load] or serving or on_trial

    def _standing_changed(self) -> None:
        """Wake the requests that wait for a server, and those that a server holds that is gone."""
        self._changed.set()
        self._changed.clear()
        if any(server.standing is Standing.SERVING for server in self._servers):
            for server in self._servers:
                if server.standing is Standing.GONE:
                    server.abort_requests()

    def _watch_ended(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled():
            self._unusable = watch.exception()
            self._standing_changed()


class Conversation:
    """The requests of one conversation, all at one server.

    So every turn finds its prefix in that server's cache, and only an update of the server changes
    the policy. The server that answers first is kept, even while it restarts. Another server takes
    over only if it is gone.
    """

    def __init__(self, pool: InferencePool) -> None:
        self._pool = pool
        self._home: PooledServer | None = None

    async def generate(self, prompt_token_ids: list[int], **sampling: Any) -> GenerateAnswer:
        """As `InferencePool.generate`."""
        deadline = Deadline(self._pool.deadline_s, self._pool.clock)
        broken: set[PooledServer] = set()
        while True:
            server = await self._pool.next_server(self._home, broken, deadline)
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
                if not self._pool.candidates(self._home, broken):
                    raise
            else:
                self._home = server
                return answer

    def session(self) -> Conversation:
        return self
