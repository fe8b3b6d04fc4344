"""One inference server of a pool: its clients, its load, its standing and the task that probes it.

away ─▶ serving             a probe finds the server healthy after a probe failed
serving ─▶ away             a request or a probe failed: the server restarts, and is waited for
away ─▶ on trial            the server is healthy although a request failed: one request decides
on trial ─▶ serving, away   that request was answered, or failed
any ─▶ gone                 no connection, or not serving for too long: the server is skipped
gone ─▶ serving, on trial   as from away
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from typing import Any

import httpx
import structlog

from grpo_core.clients.inference import GenerateAnswer, GenerationClient
from grpo_core.closing import ClosesOnAsyncExit
from grpo_core.errors import GrpoError, RequestRefused, ServiceUnavailable
from grpo_env.inference.health import HealthClient, NotAnInferenceServer

log = structlog.get_logger()

_FIRST_RECHECK_S = 0.2
_LAST_RECHECK_S = 5.0
_RECHECK_SHARE = 0.1


class Standing(Enum):
    """How the pool treats a server."""

    SERVING = auto()
    ON_TRIAL = auto()
    AWAY = auto()
    GONE = auto()


class Availability:
    """One server's standing; logs each change of it once. A new server is away until it is probed.

    Args:
        url: names the server in log events
        gone_after_s: a server that has not served for so long is gone
        on_change: called after each change of the standing
        clock: in seconds
    """

    def __init__(
        self,
        url: str,
        gone_after_s: float,
        on_change: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.standing = Standing.AWAY
        self.reason = "not probed yet"
        self._url = url
        self._gone_after_s = gone_after_s
        self._on_change = on_change
        self._clock = clock
        self._not_serving_since = clock()
        self._answered_at = self._failed_at = -math.inf
        self._has_been_unhealthy = True
        """True if a probe failed since the last failed request, or nothing was tried yet."""
        self._logged = Standing.SERVING

    @property
    def gets_requests(self) -> bool:
        return self.standing in (Standing.SERVING, Standing.ON_TRIAL)

    @property
    def recheck_s(self) -> float:
        """Seconds until the next probe of a server that does not serve: a tenth of its outage,
        within limits."""
        share_s = _RECHECK_SHARE * (self._clock() - self._not_serving_since)
        return min(max(share_s, _FIRST_RECHECK_S), _LAST_RECHECK_S)

    def request_answered(self) -> None:
        self._answered_at = self._clock()
        self._serve()

    def request_failed(self, error: Exception) -> None:
        """Record a request that the server did not answer, or answered with status 5xx."""
        self._failed_at = self._clock()
        self._has_been_unhealthy = _is_unreachable(error)
        # A restart never answers with another status than 503.
        self._stop_serving(error, is_restart=not isinstance(error, ServiceUnavailable))

    def probed(self, problem: Exception | None, began_at: float) -> None:
        """Record a probe. `problem`: why the server is unhealthy; None if it is healthy."""
        if problem is not None:
            # A busy server may answer requests sooner than the probe.
            if self._answered_at < began_at or not isinstance(problem, httpx.TimeoutException):
                self._has_been_unhealthy = True
                self._stop_serving(problem, is_restart=True)
        elif self._has_been_unhealthy:
            self._serve()
        elif self.standing is not Standing.SERVING and began_at >= self._failed_at:
            self._change(Standing.ON_TRIAL)

    def _serve(self) -> None:
        self.reason = "healthy"
        self._change(Standing.SERVING)
        if self._logged is not Standing.SERVING:
            seconds = round(self._clock() - self._not_serving_since, 1)
            log.info("server.recovered", url=self._url, away_s=seconds)
            self._logged = Standing.SERVING

    def _stop_serving(self, error: Exception, is_restart: bool) -> None:
        now = self._clock()
        self.reason = str(error) or type(error).__name__
        if self.standing is Standing.SERVING:
            self._not_serving_since = now
        is_gone = (
            self.standing is Standing.GONE
            or now - self._not_serving_since >= self._gone_after_s
            or _is_unreachable(error)
            or isinstance(error, NotAnInferenceServer)
        )
        self._change(Standing.GONE if is_gone else Standing.AWAY)
        self._log(Standing.GONE if is_gone or not is_restart else Standing.AWAY)

    def _change(self, standing: Standing) -> None:
        if standing is not self.standing:
            self.standing = standing
            self._on_change()

    def _log(self, standing: Standing) -> None:
        if self._logged is Standing.GONE or self._logged is standing:
            return
        self._logged = standing
        if standing is Standing.GONE:
            log.warning(
                "server.failed",
                url=self._url,
                reason=self.reason,
                hint="it gets requests again once it is healthy; check the server and "
                "--inference-url",
            )
        else:
            log.info("server.unresponsive", url=self._url, reason=self.reason)


def _is_unreachable(error: Exception) -> bool:
    """Nothing listens, the name is not resolved, or the host is silent. A server that restarts
    keeps its socket open."""
    return isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)


_PROBE_EVERY_S = 2.0
_NOT_FOUND = 404


class NoGenerateRoute(GrpoError):
    """The server at `--inference-url` has no route `POST /generate`."""


class PooledServer(ClosesOnAsyncExit):
    """Args as those of its clients and of `Availability`.

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
        self.url = generation.base_url
        self.load = self.picked_at = 0
        self.probed = asyncio.Event()
        self._generation = generation
        self._health = health
        self._availability = Availability(self.url, gone_after_s, on_change, clock)
        self._clock = clock
        self._in_flight: set[asyncio.Timeout] = set()
        self._request_failed = asyncio.Event()

    @property
    def standing(self) -> Standing:
        return self._availability.standing

    @property
    def reason(self) -> str:
        """The newest problem."""
        return self._availability.reason

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
        self._availability.request_answered()
        return answer

    def abort_requests(self) -> None:
        """End the requests in flight."""
        now = asyncio.get_running_loop().time()
        for until_aborted in self._in_flight:
            until_aborted.reschedule(now)
        self._in_flight.clear()

    def failed(self, error: Exception) -> None:
        """Record a failed request. A probe follows soon."""
        self._availability.request_failed(error)
        self._request_failed.set()

    async def watch(self) -> None:
        """Probe the server for ever.

        Raises:
            SharedWeightsHaveOneServer: a trainer writes the server's weights in place, and the
                pool has other servers.
        """
        while True:
            began_at = self._clock()
            self._availability.probed(await self._health.problem(), began_at)
            self.probed.set()
            await self._pause()

    async def _pause(self) -> None:
        if self._availability.gets_requests:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PROBE_EVERY_S):
                    await self._request_failed.wait()
        self._request_failed.clear()
        if not self._availability.gets_requests:
            await asyncio.sleep(self._availability.recheck_s)
