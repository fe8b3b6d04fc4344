"""Serves published weights over HTTP, for servers that do not see the trainer's disk.

The route, with `Range`, and with the server's API key if it has one:

    GET /weights/<epoch>-<step>/<file>
"""

from __future__ import annotations

import threading
from pathlib import Path

import structlog
import uvicorn
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.routing import Route

from grpo_core.http_connections import LimitedProtocol
from grpo_core.listening import EVERY_ADDRESS, LOOPBACK, in_url, listen
from grpo_core.security import BearerTokenGuard, SameSiteOnly, is_loopback
from grpo_core.weights.versions import file_below
from grpo_trainer.errors import SourcePortTaken

log = structlog.get_logger()

PREFIX = "/weights"
_KEEP_ALIVE_S = 60
_STOP_S = 5


class WeightSource:
    """Args:
    root: the directory of all versions
    address: host name or address under which servers reach this process; None: only this host does
    port: 0 for any free one
    api_key: that of the inference servers, which send it
    """

    def __init__(
        self, root: Path, address: str | None, port: int, api_key: SecretStr | None
    ) -> None:
        self._root = root
        self._address = address
        self._port = port
        self._api_key = api_key
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> list[str]:
        """Start to serve; returns the URLs below which a version's directory can be fetched.

        Raises:
            SourcePortTaken: another process listens on the port.
        """
        is_local = self._address is None or is_loopback(self._address)
        host = LOOPBACK if is_local else EVERY_ADDRESS
        if not is_local and self._api_key is None:
            log.warning(
                "weights.unprotected",
                port=self._port,
                effect="anyone who reaches this port can read the weights",
                hint="set VLLM_API_KEY for the trainer and the inference servers",
            )
        try:
            listening = listen(host, self._port)
        except OSError as error:
            raise SourcePortTaken(
                f"port {self._port}, on which the trainer serves weights to the inference servers, "
                f"cannot be opened: {error}; choose another one with --master-port or MASTER_PORT"
            ) from error
        app = Starlette(routes=[Route(f"{PREFIX}/{{version}}/{{name}}", self._file)])
        guarded = SameSiteOnly(
            BearerTokenGuard(app, self._api_key, open_paths=(), credential="VLLM_API_KEY"),
            hosts=[self._address or LOOPBACK],
        )
        self._server = uvicorn.Server(
            uvicorn.Config(
                guarded,
                http=LimitedProtocol,
                lifespan="off",
                ws="none",
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_STOP_S,
                proxy_headers=False,
                access_log=False,
                log_config=None,
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([listening],), name="weight-source", daemon=True
        )
        self._thread.start()
        port = listening.getsockname()[1]
        return [
            self._root.absolute().as_uri(),
            f"http://{in_url(self._address or LOOPBACK)}:{port}{PREFIX}",
        ]

    def close(self) -> None:
        """Finish the transfers in flight, for a few seconds at most."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join()

    async def _file(self, request: Request) -> FileResponse:
        version, name = request.path_params["version"], request.path_params["name"]
        path = file_below(self._root, version, name)
        if path is None:
            raise HTTPException(404, f"no file {version}/{name}")
        return _WeightFile(path)


class _WeightFile(FileResponse):
    chunk_size = 1 << 20  # with the default of 64 KiB, a transfer is a quarter slower
