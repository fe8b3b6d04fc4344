"""One engine process: what it is asked, and how it is ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any

import httpx
import structlog

from grpo_core.errors import GrpoError
from grpo_vllm.forkserver.client import ForkedEngine
from grpo_vllm.forkserver.protocol import SupervisorEnd

log = structlog.get_logger()

ASK_DEADLINE_S = 5.0
LOAD_DEADLINE_S = 150.0


class EngineDoesNotAnswer(GrpoError):
    """The engine process is busy, hung or gone."""


class EngineRefused(GrpoError):
    """The engine process answered 4xx: what was asked cannot be done."""


class EngineChild:
    """Lives on the running event loop.

    Args:
        process: as the fork server started it
        channel: its messages
        private_path: unix socket that it answers on
    """

    def __init__(self, process: ForkedEngine, channel: SupervisorEnd, private_path: Path) -> None:
        self._process = process
        self._channel = channel
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(private_path)),
            base_url="http://engine",
            timeout=ASK_DEADLINE_S,
        )
        self._ended = process.ended

    @property
    def pid(self) -> int:
        """0 until there is a process."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative is the signal that ended it."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """Until it has ended. Cancelling this leaves it alone."""
        return await asyncio.shield(self._ended)

    async def status(self) -> dict[str, Any]:
        """`GET /engine/status`. Raises `EngineDoesNotAnswer`."""
        answer: dict[str, Any] = await self._ask("GET", "/engine/status", ASK_DEADLINE_S)
        return answer

    async def load_adapter(self, directory: Path, version: tuple[int, int]) -> list[str]:
        """Serve the adapter; returns the adapter directories that are still read.

        Raises:
            EngineRefused: it does not take it; what it served before it serves on.
            EngineDoesNotAnswer: it is not known what it serves now.
        """
        body = {"adapter_path": str(directory), "policy_version": list(version)}
        answer = await self._ask("POST", "/lora/load", LOAD_DEADLINE_S, json=body)
        return [str(path) for path in answer["in_use"]]

    async def drain(self, within_s: float) -> None:
        """Have it answer what is under way and end. Returns at once; never raises."""
        with contextlib.suppress(EngineDoesNotAnswer, EngineRefused):
            await self._ask("POST", "/engine/drain", ASK_DEADLINE_S, json={"within_s": within_s})

    async def ended_within(self, seconds: float) -> bool:
        await asyncio.wait([self._ended], timeout=seconds)
        return self._ended.done()

    async def end(self, grace_s: float) -> int:
        """TERM, `grace_s` seconds later KILL. Its exit code."""
        if not self._ended.done():
            self._process.send(signal.SIGTERM)
        if not await self.ended_within(grace_s):
            log.warning(
                "the engine process does not end; killing it", pid=self.pid, after_s=grace_s
            )
            self._process.send(signal.SIGKILL)
        code = await self._ended
        self._process.close()
        await self._http.aclose()
        self._channel.close()
        return code

    async def _ask(self, method: str, path: str, deadline_s: float, **request: Any) -> Any:
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._http.request(method, path, timeout=deadline_s, **request)
        except (httpx.TransportError, TimeoutError) as error:
            raise EngineDoesNotAnswer(
                f"the engine process {self.pid} did not answer {method} {path} within "
                f"{deadline_s:g} s ({str(error) or type(error).__name__})"
            ) from error
        if response.is_client_error:
            raise EngineRefused(_detail(response))
        if not response.is_success:
            raise EngineDoesNotAnswer(
                f"the engine process {self.pid} answered {response.status_code}: {response.text}"
            )
        return response.json()


def _detail(response: httpx.Response) -> str:
    """Of our routes `{"detail": ...}`; the HTTP server itself refuses in plain text."""
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return response.text
