"""Compares the rollouts of two steps: distributions, and completions of the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from statistics import fmean, quantiles

from rich.cells import cell_len, set_cell_size

from grpo_core.rollouts.record import RolloutRecord
from grpo_local.report.rollout_text import (
    HEADING,
    LABEL,
    RolloutText,
    Styled,
    number,
    prompt_length,
    wrapped,
)

NAME_WIDTH, CELL_WIDTH = 20, 7
"""The table has a name and eight cells: 76 columns."""
TITLES = ("step", "count", "mean", "min", "25%", "median", "75%", "max")
BETWEEN = " | "

Value = Callable[[RolloutRecord], float | None]


@dataclass(frozen=True)
class PromptPair:
    """The sequences of one prompt at both steps, at least one each."""

    first: list[RolloutRecord]
    second: list[RolloutRecord]

    @property
    def gain(self) -> float:
        """How much higher the mean score is at the second step."""
        return _mean_score(self.second) - _mean_score(self.first)


@dataclass(frozen=True)
class StepComparison:
    """`first` and `second`: the records of one step each, at least one."""

    first: list[RolloutRecord]
    second: list[RolloutRecord]

    def distributions(self) -> Iterator[str]:
        """A table of score, length and each part of the reward."""
        yield _table_line("", TITLES)
        yield from self._rows("score", lambda record: record.score)
        yield from self._rows("completion tokens", lambda record: record.completion_tokens)
        both = (*self.first, *self.second)
        for name in dict.fromkeys(name for record in both for name in record.parts):
            yield from self._rows(f"part {name}", partial(_part, name))

    def pairs(self, worst: bool = False, best: bool = False) -> list[PromptPair]:
        """The prompts of both steps in the order of the first; those that lost or gained most come
        first if `worst` or `best`."""
        first, second = _by_prompt(self.first), _by_prompt(self.second)
        found = [PromptPair(first[prompt], second[prompt]) for prompt in first if prompt in second]
        if worst or best:
            found.sort(key=lambda pair: pair.gain, reverse=best)
        return found

    def _rows(self, name: str, value: Value) -> Iterator[str]:
        for records in (self.first, self.second):
            values = [found for record in records if (found := value(record)) is not None]
            if values:
                cells = [f"{records[0].step}", f"{len(values)}", *map(number, _summary(values))]
                yield _table_line(name, cells)
                name = ""


def pair_lines(
    pair: PromptPair, text: RolloutText, width: int, worst: bool, best: bool
) -> Iterator[Styled]:
    """The prompt, and one completion of each step side by side: that with the lowest or highest
    score if `worst` or `best`, otherwise the first."""
    before, after = _mean_score(pair.first), _mean_score(pair.second)
    task = pair.first[0].task
    heading = f"mean score {number(before)} -> {number(after)}"
    yield f"{task}: {heading}" if task else heading, HEADING
    for line in wrapped(text.prompt(pair.first[0]), width - 2):
        yield f"  {line}", None
    chosen = [_chosen(records, worst, best) for records in (pair.first, pair.second)]
    column = (width - len(BETWEEN)) // 2
    titles = [f"step {r.step}, score {number(r.score)}" for r in chosen]
    yield _beside(titles, column), LABEL
    left, right = (wrapped(text.completion(record), column) for record in chosen)
    for cells in zip_longest(left, right, fillvalue=""):
        yield _beside(cells, column), None
    yield "", None


def _chosen(records: Sequence[RolloutRecord], worst: bool, best: bool) -> RolloutRecord:
    if not (worst or best):
        return records[0]
    return (max if best else min)(records, key=lambda record: record.score)


def _by_prompt(records: Sequence[RolloutRecord]) -> dict[Hashable, list[RolloutRecord]]:
    """By the item of the task, or by the prompt's tokens if the environment names no items."""
    found: dict[Hashable, list[RolloutRecord]] = {}
    for record in records:
        prompt = record.item or tuple(record.tokens[: prompt_length(record)])
        found.setdefault((record.task, prompt), []).append(record)
    return found


def _mean_score(records: Sequence[RolloutRecord]) -> float:
    return fmean(record.score for record in records)


def _part(name: str, record: RolloutRecord) -> float | None:
    return record.parts.get(name)


def _summary(values: Sequence[float]) -> list[float]:
    """Mean, minimum, quartiles and maximum."""
    quarters = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return [fmean(values), min(values), *quarters, max(values)]


def _table_line(name: str, cells: Sequence[str]) -> str:
    return set_cell_size(name, NAME_WIDTH) + "".join(cell.rjust(CELL_WIDTH) for cell in cells)


def _beside(cells: Sequence[str], width: int) -> str:
    """Two cells of at most `width` columns."""
    left, right = cells
    return f"{left}{' ' * (width - cell_len(left))}{BETWEEN}{right}".rstrip()
