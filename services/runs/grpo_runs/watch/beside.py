"""The live page beside a run that a command has started."""

from __future__ import annotations

import contextlib
import sys
import webbrowser
from collections.abc import Iterator
from typing import TYPE_CHECKING

from grpo_core.security import plain
from grpo_runs.run_directory import RunDirectory
from grpo_runs.screen import Screen

if TYPE_CHECKING:
    from grpo_runs.settings.run import RunSettings

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def page_beside(settings: RunSettings, run: RunDirectory, screen: Screen) -> Iterator[None]:
    """Serve the page of the run while the context is open: with --watch, and by default where
    somebody sits at a terminal. A browser shows it if one is at hand.

    Raises:
        PageNotServed: nothing can listen on a port of this machine.
    """
    wanted = sys.stdout.isatty() if settings.watch is None else settings.watch
    if not wanted:
        yield
        return
    from grpo_runs.watch.serve import PageServer, has_browser, live_runs

    page = PageServer(live_runs([run.path], plain(settings.run_api_token)), LOOPBACK, port=0)
    with page.in_a_thread():
        screen.line(f"watch this run at {page.url}")
        if has_browser():
            webbrowser.open(page.url)
        yield
