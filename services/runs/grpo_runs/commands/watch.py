"""`grpo-watch`: shows runs while they train."""

from __future__ import annotations

import webbrowser

from grpo_core.errors import GrpoError
from grpo_core.security import plain
from grpo_runs.screen import Screen
from grpo_runs.settings.watch import WatchSettings
from grpo_runs.watch.serve import PageServer, live_runs
from grpo_runs.watch.terminal import watch_in_terminal


def watch(settings: WatchSettings, screen: Screen) -> int:
    """Returns the exit status, once the user has stopped it."""
    runs = live_runs(settings.runs, plain(settings.run_api_token))
    if settings.terminal:
        watch_in_terminal(runs[0])
        return 0
    try:
        page = PageServer(runs, settings.host, settings.port, settings.needed_token, settings.hosts)
    except GrpoError as error:
        return screen.failed(error)
    screen.line(f"watch at {page.url} (Ctrl-C ends)")
    if settings.open and not webbrowser.open(page.url):
        screen.warning(f"no browser was found; open {page.url} in one")
    page.run()
    return 0
