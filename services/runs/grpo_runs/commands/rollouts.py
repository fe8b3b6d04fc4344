"""`grpo-rollouts` and `grpo-report`: show the sequences of a run, in a terminal or on a page."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import os
import sys
import webbrowser
from collections.abc import Iterable

from grpo_core.errors import GrpoError
from grpo_core.rollouts.files import read_steps, steps_in
from grpo_core.rollouts.record import RolloutRecord
from grpo_runs.report.page import write_report
from grpo_runs.report.rollouts import RolloutText, StepComparison, pair_lines, sample_lines
from grpo_runs.run_directory import RunDirectory
from grpo_runs.screen import EXIT_FAILED, Screen
from grpo_runs.settings import ReportSettings, RolloutsSettings


def show_rollouts(settings: RolloutsSettings, screen: Screen) -> int:
    """Returns the exit status: 0, or 1 if a file cannot be read or no sequence passes the
    filters."""
    try:
        any_passed = _write(settings, screen)
    except BrokenPipeError:  # `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except GrpoError as error:
        return screen.failed(error)
    if not any_passed:
        screen.failure("no sequence passes the filters; widen them, or pass --step all")
    return 0 if any_passed else EXIT_FAILED


def _write(settings: RolloutsSettings, screen: Screen) -> bool:
    """False if no sequence passes the filters."""
    if settings.diff:
        return _show_diff(settings, settings.diff, screen)
    steps = settings.steps(steps_in(settings.directory))
    records = filter(settings.includes, read_steps(settings.directory, steps))
    chosen = ranked(settings, records)
    return _write_json(chosen) if settings.json_lines else _show(settings, chosen, screen)


def ranked(settings: RolloutsSettings, records: Iterable[RolloutRecord]) -> Iterable[RolloutRecord]:
    """The records to show, in order. Of equal scores, the earlier record comes first."""
    if not (settings.worst or settings.best):
        return itertools.islice(records, settings.shown)
    sign = -1 if settings.best else 1

    def rank(record: RolloutRecord) -> float:
        return sign * record.score

    if settings.shown is None:
        return sorted(records, key=rank)
    return heapq.nsmallest(settings.shown, records, key=rank)


def _write_json(records: Iterable[RolloutRecord]) -> bool:
    any_passed = False
    for record in records:
        any_passed = True
        sys.stdout.write(json.dumps(dataclasses.asdict(record), ensure_ascii=False) + "\n")
    sys.stdout.flush()
    return any_passed


def _show(settings: RolloutsSettings, records: Iterable[RolloutRecord], screen: Screen) -> bool:
    text, any_passed = RolloutText(settings.directory), False
    for record in records:
        any_passed = True
        for line, style in sample_lines(record, text, screen.width):
            screen.line(line, style)
    return any_passed


def _show_diff(settings: RolloutsSettings, steps: tuple[int, int], screen: Screen) -> bool:
    """False if no sequence of a step passes the filters."""
    first, second = (
        [*filter(settings.includes, read_steps(settings.directory, {step}))] for step in steps
    )
    if not (first and second):
        return False
    comparison, text = StepComparison(first, second), RolloutText(settings.directory)
    screen.lines([*comparison.distributions(), ""])
    pairs = comparison.pairs(settings.worst, settings.best)
    screen.line(f"prompts of both steps: {len(pairs)}")
    for pair in pairs[: settings.shown]:
        for line, style in pair_lines(pair, text, screen.width, settings.worst, settings.best):
            screen.line(line, style)
    return True


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
