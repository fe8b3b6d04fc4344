"""`grpo-report`: writes the page that shows a run."""

from __future__ import annotations

import webbrowser

from grpo_core.errors import GrpoError
from grpo_local.report.page import write_report
from grpo_local.run_directory import RunDirectory
from grpo_local.screen import Screen
from grpo_local.settings import ReportSettings


def report(settings: ReportSettings, screen: Screen) -> int:
    """Returns the exit status."""
    try:
        with screen.activity(f"reading {settings.run}"):
            page = write_report(RunDirectory.of(settings.run), settings.output)
    except (GrpoError, OSError) as error:
        return screen.failed(error)
    screen.line(f"report: {page}")
    if settings.open and not webbrowser.open(page.absolute().as_uri()):
        return screen.failed(NoBrowser(f"no browser was found; open {page} in one"))
    return 0


class NoBrowser(GrpoError):
    """`--open` was given, and no browser could be started."""
