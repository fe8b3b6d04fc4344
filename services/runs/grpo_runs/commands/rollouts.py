"""`grpo-rollouts` and `grpo-report`: show the sequences of a run, in a terminal or on a page.

Lines in a terminal fit its width and hold no control characters.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import os
import sys
import webbrowser
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, quantiles

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from grpo_core.errors import GrpoError
from grpo_core.rollouts.files import read_steps, steps_in
from grpo_core.rollouts.record import RolloutRecord, printable, split_conversation, text_of
from grpo_runs.report.lost import lost_lines
from grpo_runs.report.page import token_texts, write_report
from grpo_runs.run_directory import RunDirectory
from grpo_runs.screen import EXIT_FAILED, Screen
from grpo_runs.settings.rollouts import ReportSettings, RolloutsSettings

Styled = tuple[str, str | None]
"""A line and its style."""
Records = list[RolloutRecord]


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
    text, any_passed = RolloutText(settings.directory), False
    for record in ranked(settings, records):
        any_passed = True
        if settings.json_lines:
            sys.stdout.write(json.dumps(dataclasses.asdict(record), ensure_ascii=False) + "\n")
        else:
            for line, style in sample_lines(record, text, screen.width):
                screen.line(line, style)
    if not settings.json_lines:
        screen.lines(lost_lines(RunDirectory(settings.run)))
    sys.stdout.flush()
    return any_passed


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


HEADING, LABEL = "bold", "cyan"
_INDENT = "  "
_GAP = "  "


class RolloutText:
    """Prompts and completions. Those of an environment that sends no messages are the texts of the
    tokens.

    Args: directory: with the rollouts
    """

    def __init__(self, directory: Path) -> None:
        self._texts = cache(lambda: token_texts(directory))

    def prompt(self, record: RolloutRecord) -> str:
        if record.messages:
            return text_of(split_conversation(record)[0])
        return self._joined(record.tokens[: record.prompt_length])

    def completion(self, record: RolloutRecord) -> str:
        if record.messages:
            return text_of(split_conversation(record)[1])
        return self._joined(record.tokens[record.prompt_length :])

    def _joined(self, tokens: list[int]) -> str:
        """Raises `BrokenRollouts`."""
        if (texts := self._texts()) is None:
            return f"token ids: {' '.join(map(str, tokens))}"
        return "".join(texts(tokens))


def sample_lines(record: RolloutRecord, text: RolloutText, width: int) -> Iterator[Styled]:
    """One sequence: what is known of it, the prompt, the completion and the grader's reason."""
    yield from ((line, HEADING) for line in _filled(_facts(record), width))
    parts = {"prompt": text.prompt(record), "completion": text.completion(record)}
    if record.reason:
        parts["reason"] = record.reason
    for label, part in parts.items():
        yield label, LABEL
        yield from ((f"{_INDENT}{line}", None) for line in wrapped(part, width - len(_INDENT)))
    yield "", None


def _facts(record: RolloutRecord) -> Iterator[str]:
    yield f"step {record.step}"
    part = " (part {} of {})".format(*record.part) if record.part else ""
    yield f"group {record.group}.{record.index}{part}"
    if record.task:
        yield record.task
    yield f"score {number(record.score)}"
    yield from (f"{name} {number(value)}" for name, value in record.parts.items())
    if record.advantage is not None:
        yield f"advantage {record.advantage:+.3g}"
    ended = f" ({record.finish_reason})" if record.finish_reason else ""
    prompt = len(record.tokens) - record.completion_tokens
    yield f"tokens {prompt} + {record.completion_tokens}{ended}"
    if tried := record.attempts.get("tried"):
        lost = ", ".join(f"{n:g} {why}" for why, n in record.attempts.items() if why != "tried")
        yield f"attempt {tried:g} (lost: {lost})"
    if record.staleness is not None:
        yield f"staleness {record.staleness}"
    if (difference := record.mean_logprob_difference) is not None:
        yield f"|logprob difference| {difference:.1e}"


def number(value: float) -> str:
    return f"{value:.3g}"


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns. Wide characters count as two."""
    console = Console(width=width)
    lines = (Text(printable(line.expandtabs())) for line in text.split("\n"))
    return [
        part.plain.rstrip()
        for line in lines
        for part in line.wrap(console, width, overflow="fold") or [Text()]
    ]


def _filled(words: Iterator[str], width: int) -> Iterator[str]:
    """The words in lines of at most `width` columns, none of them divided."""
    line = next(words)
    for word in words:
        if len(line) + len(_GAP) + len(word) > width:
            yield line
            line = _INDENT + word
        else:
            line += _GAP + word
    yield line


NAME_WIDTH, CELL_WIDTH = 20, 7
"""The table has a name and eight cells: 76 columns."""
TITLES = ("step", "count", "mean", "min", "25%", "median", "75%", "max")
BETWEEN = " | "


def _show_diff(settings: RolloutsSettings, steps: tuple[int, int], screen: Screen) -> bool:
    """False if no sequence of a step passes the filters."""
    first, second = (
        [*filter(settings.includes, read_steps(settings.directory, {step}))] for step in steps
    )
    if not (first and second):
        return False
    screen.lines([*distributions(first, second), ""])
    before, after = _by_prompt(first), _by_prompt(second)
    pairs = [(before[prompt], after[prompt]) for prompt in before if prompt in after]
    if settings.worst or settings.best:
        # By how much higher the mean score is at the second step.
        pairs.sort(key=lambda two: _mean_score(two[1]) - _mean_score(two[0]), reverse=settings.best)
    screen.line(f"prompts of both steps: {len(pairs)}")
    text = RolloutText(settings.directory)
    for pair in pairs[: settings.shown]:
        for line, style in pair_lines(pair, text, settings, screen.width):
            screen.line(line, style)
    return True


def distributions(first: Records, second: Records) -> Iterator[str]:
    """A table of score, length and each part of the reward, of two steps."""
    yield _table_line("", TITLES)
    sides = [[_values(record) for record in records] for records in (first, second)]
    for name in dict.fromkeys(name for values in (*sides[0], *sides[1]) for name in values):
        title = name
        for records, side in zip((first, second), sides, strict=True):
            found = [values[name] for values in side if name in values]
            if found:
                cells = [f"{records[0].step}", f"{len(found)}", *map(number, _summary(found))]
                yield _table_line(title, cells)
                title = ""


def _values(record: RolloutRecord) -> dict[str, float]:
    parts = {f"part {name}": value for name, value in record.parts.items()}
    return {"score": record.score, "completion tokens": record.completion_tokens, **parts}


def _summary(values: Sequence[float]) -> list[float]:
    """Mean, minimum, quartiles and maximum."""
    quarters = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return [fmean(values), min(values), *quarters, max(values)]


def pair_lines(
    pair: tuple[Records, Records], text: RolloutText, settings: RolloutsSettings, width: int
) -> Iterator[Styled]:
    """The prompt, and one completion of each step side by side: that with the lowest or highest
    score for --worst or --best, otherwise the first."""
    before, after = map(_mean_score, pair)
    task = pair[0][0].task
    heading = f"mean score {number(before)} -> {number(after)}"
    yield f"{task}: {heading}" if task else heading, HEADING
    for line in wrapped(text.prompt(pair[0][0]), width - 2):
        yield f"  {line}", None
    chosen = [next(iter(ranked(settings, records))) for records in pair]
    column = (width - len(BETWEEN)) // 2
    titles = [f"step {r.step}, score {number(r.score)}" for r in chosen]
    yield _beside(titles, column), LABEL
    left, right = (wrapped(text.completion(record), column) for record in chosen)
    for cells in itertools.zip_longest(left, right, fillvalue=""):
        yield _beside(cells, column), None
    yield "", None


def _by_prompt(records: Records) -> dict[Hashable, Records]:
    """By the item of the task, or by the prompt's tokens if the environment names no items."""
    found: dict[Hashable, Records] = {}
    for record in records:
        prompt = record.item or tuple(record.tokens[: record.prompt_length])
        found.setdefault((record.task, prompt), []).append(record)
    return found


def _mean_score(records: Records) -> float:
    return fmean(record.score for record in records)


def _table_line(name: str, cells: Sequence[str]) -> str:
    return set_cell_size(name, NAME_WIDTH) + "".join(cell.rjust(CELL_WIDTH) for cell in cells)


def _beside(cells: Sequence[str], width: int) -> str:
    """Two cells of at most `width` columns."""
    left, right = cells
    return f"{left}{' ' * (width - cell_len(left))}{BETWEEN}{right}".rstrip()
