"""One inference server of a pool: its clients, its load, and the task that probes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from grpo_core.clients.inference import GenerateAnswer, GenerationClient
from grpo_core.errors import GrpoError, RequestRefused
from grpo_core.process.closing import ClosesOnAsyncExit
from grpo_env.inference.availability import Availability, Standing
from grpo_env.inference.health import HealthClient

_PROBE_EVERY_S = 2.0
_NOT_FOUND = 404


class NoGenerateRoute(GrpoError):
    """The server at `--inference-url` has no route `POST /generate`."""


class Server(ClosesOnAsyncExit):
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
            TimeoutError: `let_go` ended the request.
            NoGenerateRoute: the server has no such route.
        """
        sequences = sampling.get("n", 1)
        self.load += sequences
        try:
            async with asyncio.timeout(None) as until_let_go:
                self._in_flight.add(until_let_go)
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
            self._in_flight.discard(until_let_go)
            self.load -= sequences
        self._availability.request_answered()
        return answer

    def let_go(self) -> None:
        """End the requests in flight."""
        now = asyncio.get_running_loop().time()
        for until_let_go in self._in_flight:
            until_let_go.reschedule(now)
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
