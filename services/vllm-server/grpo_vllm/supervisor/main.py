"""Starts the supervisor: checks the host, opens the sockets, connects its parts, reports health."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence

import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from grpo_core.http_connections import raise_open_files
from grpo_core.process import adopt_orphans, children
from grpo_core.security import SameSiteOnly
from grpo_core.temporary import temporary_directory
from grpo_core.tree.server import ServerSettings
from grpo_core.weights.servers import ServerState, ServerStatus
from grpo_core.weights.version_log import ServerVersionLog
from grpo_core.weights.versions import file_below
from grpo_vllm.http_server import require_api_key, serving
from grpo_vllm.supervisor.engine import ENGINE_MODULE, ForkServer
from grpo_vllm.supervisor.host import Sockets, require_shared_memory
from grpo_vllm.supervisor.ownership import RunOwner
from grpo_vllm.supervisor.supervisor import Supervisor
from grpo_vllm.weights.fetch import Fetcher, HttpTransport
from grpo_vllm.weights.served_store import RedisServedStore, ServedStore
from grpo_vllm.weights.socket_server import make_private_directory
from grpo_vllm.weights.staging import Staging

log = structlog.get_logger()

_REAP_AGAIN_S = 1.0


def supervise(
    settings: ServerSettings, arguments: Sequence[str], engine_module: str = ENGINE_MODULE
) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status.

    Raises:
        OSError: an address is in use, or the directory for weights cannot be created.
        GrpoError: the weights to serve are unknown or missing, /dev/shm is too small, or other
            users can enter the directory of the weight socket, or another server serves the run.
    """
    require_shared_memory(settings.engine_arguments)
    if settings.share_weights:
        make_private_directory(settings.socket_path.parent)
    else:
        # A server for which no trainer runs needs no directory, so it starts without one.
        with contextlib.nullcontext() if settings.weights_dir else contextlib.suppress(OSError):
            settings.loads_from.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    raise_open_files()  # a descriptor per parked connection
    with temporary_directory() as private, Sockets.open(settings, private) as sockets:
        return asyncio.run(_run(settings, arguments, sockets, engine_module))


async def _run(
    settings: ServerSettings, arguments: Sequence[str], sockets: Sockets, engine_module: str
) -> int:
    async with contextlib.AsyncExitStack() as stack:
        store, versions, owner, staging, fetcher = ServedStore(), None, None, None, None
        host = ForkServer(engine_module, arguments, sockets.private_path.parent)
        if (url := settings.redis) is not None:
            store = await stack.enter_async_context(
                RedisServedStore(url, settings.run_id, settings.redis_required)
            )
            versions = ServerVersionLog(url, settings.run_id, settings.server_name)
            await stack.enter_async_context(versions)
            if settings.follows:
                staging = Staging(settings.staging, settings.loads_from)
                transport = await stack.enter_async_context(HttpTransport(settings.api_key))
                fetcher = Fetcher(versions, transport, staging, settings.weights_url)
        supervisor = Supervisor(settings, sockets, store, host, versions, fetcher)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, supervisor.stop)
        loop.add_signal_handler(signal.SIGCHLD, _reap_strangers, host)
        if url is not None and versions is not None:
            owner = RunOwner(url, settings.run_id, settings.server_name, settings.share_weights)
            await (await stack.enter_async_context(owner)).claim()
            stack.push_async_callback(versions.leave)
            if staging is not None:
                await staging.clear()
                stack.push_async_callback(staging.clear)
        stack.push_async_callback(host.close)
        app = health_app(supervisor.status, supervisor.ready, settings)
        await stack.enter_async_context(serving(app, sockets.health))
        return await supervisor.run(owner)


def _reap_strangers(host: ForkServer) -> None:
    """Reap processes that vLLM left behind. The supervisor inherits them as the first process of a
    container, or as the nearest subreaper."""
    if not host.pids:
        # The fork server is starting or has just ended. asyncio reaps it.
        asyncio.get_running_loop().call_later(_REAP_AGAIN_S, _reap_strangers, host)
        return
    for pid in children() - host.pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def health_app(
    status: Callable[[], ServerStatus], ready: Callable[[], bool], settings: ServerSettings
) -> ASGIApp:
    """`/healthz`: 200 unless the supervisor has given up. `/readyz`: 200 if requests are answered
    now. `/status`: the whole status; needs the API key. `/weights/<id>/<file>`: copies of versions,
    for other servers; needs the API key."""

    def answer(is_good: bool) -> Response:
        now = status()
        body = {"state": now.state.value, "reason": now.reason}
        return JSONResponse(body, 200 if is_good else 503)

    async def healthz(_request: Request) -> Response:
        return answer(status().state is not ServerState.FAILED)

    async def readyz(_request: Request) -> Response:
        return answer(ready())

    async def everything(_request: Request) -> Response:
        return JSONResponse(status().model_dump(mode="json"))

    async def weights(request: Request) -> Response:
        version, name = request.path_params["version"], request.path_params["file"]
        path = file_below(settings.staging, version, name)
        if path is None:
            return JSONResponse({"detail": f"{version}/{name}: no such file"}, 404)
        return FileResponse(path)

    handlers = {"/healthz": healthz, "/readyz": readyz, "/status": everything}
    routes = [Route(path, handler) for path, handler in handlers.items()]
    if settings.follows:
        routes.append(Route("/weights/{version}/{file}", weights))
    guarded = require_api_key(Starlette(routes=routes), settings.api_key)
    return SameSiteOnly(guarded, hosts=settings.own_hosts)
