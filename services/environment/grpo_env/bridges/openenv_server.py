"""Servers of OpenEnv environments: starts one here, and holds sessions with it.

OpenEnv's own protocol, spoken without its package: JSON messages `reset`, `step`, `state` and
`close` through the WebSocket `/ws`, where each connection has an environment of its own, and
`GET /schema`.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from grpo_core.process import ManagedProcess, describe_exit
from grpo_core.service_url import ServiceUrl
from grpo_core.settings.command import holds_secret
from grpo_core.sockets import proxy_for
from grpo_core.temporary import temporary_directory
from grpo_env.bridges import EnvironmentLost, EnvironmentUnusable
from grpo_env.tasks import RolloutFailed

_START_S = 120.0
"""Limit for a server to answer for the first time."""
_REPORTED = re.compile(r"Uvicorn running on (http://[^\s]+)")
_FULL = "CAPACITY_REACHED"
_INVALID = "VALIDATION_ERROR"
_ASK_AGAIN_S = 0.2
_END_S = 1.0
_LARGEST_MESSAGE_BYTES = 100 * 2**20


class ActionInvalid(ValueError):
    """The environment does not accept the action. The message is for the policy."""


class Session:
    """One environment of a server.

    Args: deadline_s: of one answer
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, deadline_s: float) -> None:
        self._socket = socket
        self._deadline_s = deadline_s
        self._answers: asyncio.Queue[aiohttp.WSMessage | None] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Read all the time: aiohttp answers the server's pings only while it reads, and the policy
        may think for longer than a server waits for that."""
        with suppress(ConnectionError, aiohttp.ClientError):
            async for message in self._socket:
                self._answers.put_nowait(message)
        self._answers.put_nowait(None)

    async def ask(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The data of the answer to a `reset`, `step` or `state`.

        Raises:
            ServerFull: the server has no room for another session.
            ActionInvalid: see there.
            RolloutFailed: the environment raised an error, ended the session, or is too slow.
        """
        try:
            await self._socket.send_json({"type": kind} | ({} if data is None else {"data": data}))
            message = await asyncio.wait_for(self._answers.get(), self._deadline_s)
        except TimeoutError as error:
            raise RolloutFailed(
                f"no answer to {kind} in {self._deadline_s:g} s; raise deadline_s of --task-args"
            ) from error
        except (ConnectionError, aiohttp.ClientError) as error:
            raise RolloutFailed(f"the environment ended the session: {error}") from error
        if message is None or message.type is not aiohttp.WSMsgType.TEXT:
            raise RolloutFailed(f"the environment ended the session instead of answering {kind}")
        answer = message.json()
        found: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") == "error":
            raise _error_of(kind, found)
        return found

    async def close(self) -> None:
        """End the session, if the server still listens."""
        with suppress(ConnectionError, aiohttp.ClientError):
            await self._socket.send_json({"type": "close"})
        await self._socket.close()
        await self._reader


class ServerFull(Exception):
    """All sessions of the server are in use. limit: their number, if the server states it."""

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self.limit = limit


def _error_of(kind: str, data: Mapping[str, Any]) -> Exception:
    text = str(data.get("message") or "no message")
    if data.get("code") == _FULL:
        return ServerFull(data.get("max_sessions"))
    if data.get("code") == _INVALID and kind == "step":
        return ActionInvalid(_listed(data.get("errors") or ()) or text)
    return RolloutFailed(f"{kind}: {text} ({data.get('code')})")


def _listed(errors: Sequence[Mapping[str, Any]]) -> str:
    """Pydantic's errors: `message: Field required; count: Input should be a valid integer`."""
    return "; ".join(
        f"{'.'.join(map(str, error.get('loc', ()))) or 'action'}: {error.get('msg')}"
        for error in errors
    )


class LocalServer:
    """An environment's server on this host, on a free port of the loopback interface.

    Args:
        app: as uvicorn names it: `server.app:app`
        directory: where it runs
        python: of the environment's packages

    Raises:
        ProcessFailed: it does not start.
    """

    def __init__(self, app: str, directory: Path, python: str) -> None:
        self._stack = ExitStack()
        logs = self._stack.enter_context(temporary_directory())
        command = [python, "-m", "uvicorn", app, "--host", "127.0.0.1", "--port", "0"]
        hidden = [f"--unset={name}" for name in os.environ if holds_secret(name)]
        self.process = ManagedProcess(
            f"the environment's server ({app})",
            ["env", *hidden, f"--chdir={directory}", *command],
            logs / "server.log",
            {"PYTHONUNBUFFERED": "1"},
        )
        try:
            self.process.wait_until(lambda: bool(self.url), _START_S)
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """Empty until it serves."""
        found = _REPORTED.search(self.process.log_text())
        return found[1] if found else ""

    def close(self) -> None:
        self.process.stop(grace_s=5.0)
        self._stack.close()


class OpenEnvServer:
    """A server with sessions, as many as it has room for.

    Args:
        local: if it was started here
        deadline_s: of one answer
    """

    def __init__(self, url: str, deadline_s: float, local: LocalServer | None = None) -> None:
        self.url = ServiceUrl(url.rstrip("/"))
        self._deadline_s = deadline_s
        self._local = local
        self._open = 0
        self._limit: int | None = None
        self._changed = asyncio.Condition()

    def schema(self) -> dict[str, Any]:
        """The JSON schemas of actions, observations and the state. Waits until the server answers.
        Raises `EnvironmentUnusable`: it does not answer, or is no server of OpenEnv."""
        deadline = time.monotonic() + _START_S
        while True:
            try:
                way = httpx.HTTPTransport(proxy=proxy_for(self.url))
                headers = self.url.authorization()
                with httpx.Client(transport=way, timeout=30.0, headers=headers) as http:
                    answer = http.get(f"{self.url}/schema")
                break
            except httpx.TransportError as error:
                if time.monotonic() > deadline:
                    raise EnvironmentUnusable(
                        f"no server answers at {self.url} ({error}); start the environment's "
                        "server, or give the directory of the environment instead"
                    ) from error
                time.sleep(_ASK_AGAIN_S)
        try:
            found = answer.raise_for_status().json()
            return {"action": found["action"], "observation": found["observation"]}
        except (httpx.HTTPStatusError, ValueError, KeyError, TypeError) as error:
            raise EnvironmentUnusable(
                f"{self.url}/schema is not what a server of OpenEnv answers ({error}); "
                "openenv-core 0.2 and newer have it"
            ) from error

    @asynccontextmanager
    async def session(
        self, arguments: Mapping[str, Any]
    ) -> AsyncIterator[tuple[Session, dict[str, Any]]]:
        """A session and what its `reset` answered. Waits while the server is full.

        Raises:
            EnvironmentLost: the server does not answer any more.
            EnvironmentUnusable: the server is full with sessions of others.
            RolloutFailed: see `Session.ask`.
        """
        deadline = time.monotonic() + _START_S
        async with aiohttp.ClientSession() as http:
            while True:
                async with self._slot():
                    socket = await self._connect(http)
                    session = Session(socket, self._deadline_s)
                    try:
                        first = await session.ask("reset", arguments)
                        yield session, first
                        return
                    except ServerFull as full:
                        self._limit = full.limit or max(self._open - 1, 1)
                    except RolloutFailed:
                        if self._local is not None and socket.closed:
                            await asyncio.sleep(_END_S)  # its socket closes before it has ended
                            self._require_alive()
                        raise
                    finally:
                        await session.close()
                if self._open == 0 and time.monotonic() > deadline:
                    raise EnvironmentUnusable(
                        f"all {self._limit} sessions of the server at {self.url} are in use by "
                        "others; raise max_concurrent_envs of its create_app"
                    )
                await asyncio.sleep(_ASK_AGAIN_S)  # it closes a session later than we do

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._limit is None or self._open < self._limit)
            self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            async with self._changed:
                self._changed.notify()

    async def _connect(self, http: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse:
        try:
            return await http.ws_connect(
                f"{self.url}/ws",
                max_msg_size=_LARGEST_MESSAGE_BYTES,
                proxy=proxy_for(self.url),
                headers=self.url.authorization(),
            )
        except aiohttp.WSServerHandshakeError as error:
            raise EnvironmentUnusable(
                f"{self.url}/ws takes no WebSocket ({error.status}); it needs openenv-core 0.2 or "
                "newer"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            self._require_alive()
            raise EnvironmentLost(
                f"{self.url} does not answer any more ({error}); start it again, then env-server"
            ) from error

    def _require_alive(self) -> None:
        """Raises `EnvironmentLost` if a server that was started here has ended."""
        if self._local is not None and (code := self._local.process.exit_code) is not None:
            raise EnvironmentLost(
                f"{self._local.process.name} ended with {describe_exit(code)}; its last lines:\n"
                f"{self._local.process.log_tail()}"
            )
