"""`grpo-watch`: serves the live page, in the foreground or in a thread beside a run."""

from __future__ import annotations

import contextlib
import os
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn
from pydantic import SecretStr

from grpo_core.errors import GrpoError
from grpo_core.http_connections import LimitedProtocol
from grpo_core.listening import in_url, listen
from grpo_core.security import listed, plain
from grpo_runs.run_directory import RunDirectory
from grpo_runs.screen import Screen
from grpo_runs.settings.watch import WatchSettings
from grpo_runs.watch.access import PARAMETER
from grpo_runs.watch.api import watch_app
from grpo_runs.watch.live_run import LiveRun
from grpo_runs.watch.terminal import watch_in_terminal


def watch(settings: WatchSettings, screen: Screen) -> int:
    """Returns the exit status, once the user has stopped it."""
    runs = live_runs(settings.runs, plain(settings.run_api_token))
    if settings.terminal:
        watch_in_terminal(runs[0])
        return 0
    try:
        hosts = listed(settings.allowed_hosts)
        page = PageServer(runs, settings.host, settings.port, settings.needed_token, hosts)
    except GrpoError as error:
        return screen.failed(error)
    screen.line(f"watch at {page.url} (Ctrl-C ends)")
    if settings.open and not webbrowser.open(page.url):
        screen.warning(f"no browser was found; open {page.url} in one")
    page.run()
    return 0


class PageNotServed(GrpoError):
    """The address of the live page cannot be listened on."""


class PageServer:
    """The live page of some runs.

    Args:
        port: 0 for any free port
        token: see `watch_app`

    Raises:
        PageNotServed: nothing can listen there.
    """

    def __init__(
        self,
        runs: Sequence[LiveRun],
        host: str,
        port: int,
        token: SecretStr | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        try:
            self._socket = listen(host, port)
        except OSError as error:
            raise PageNotServed(
                f"the live page cannot listen on {host} port {port}: {error.strerror or error}; "
                "choose another --port or --host"
            ) from error
        bound = self._socket.getsockname()[1]
        self.url = f"http://{in_url(host)}:{bound}/"
        if token is not None:
            self.url += f"?{PARAMETER}={token.get_secret_value()}"
        config = uvicorn.Config(
            watch_app(runs, token, hosts),
            http=LimitedProtocol,
            log_level="error",
            timeout_graceful_shutdown=1,
            lifespan="off",
        )
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        """Until a stop signal arrives."""
        self._server.run(sockets=[self._socket])

    @contextlib.contextmanager
    def in_a_thread(self) -> Iterator[None]:
        """Serve while the context is open."""
        thread = threading.Thread(target=self.run, name="live page", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._server.should_exit = True
            thread.join()
            self._socket.close()


def live_runs(paths: Sequence[Path], token: str | None = None) -> list[LiveRun]:
    """Args:
    paths: directories of runs
    token: the access token of their run-api
    """
    runs = [RunDirectory.of(path) for path in paths]
    ids: dict[str, RunDirectory] = {}
    for run in runs:
        id, number = run.path.resolve().name, 2
        while id in ids:
            id, number = f"{run.path.resolve().name}-{number}", number + 1
        ids[id] = run
    return [LiveRun(id, run, token) for id, run in ids.items()]


def has_browser() -> bool:
    """Whether a browser with a window can be opened here."""
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True
