"""Recorded sequences as text for a terminal, and the comparison of two steps.

Lines fit its width and hold no control characters.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, quantiles
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from grpo_core.errors import BrokenRollouts
from grpo_core.rollouts.files import TOKENIZER
from grpo_core.rollouts.record import RolloutRecord, split_conversation, text_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Styled = tuple[str, str | None]
"""A line and its style."""

HEADING, LABEL = "bold", "cyan"
_INDENT = "  "
_GAP = "  "
_CONTROLS = {
    code: f"\\x{code:02x}"
    for code in range(256)
    if unicodedata.category(chr(code)) == "Cc" and chr(code) not in "\n\t"
}


class RolloutText:
    """Prompts and completions. Those of an environment that sends no messages are decoded from the
    tokens.

    Args: directory: with the rollouts
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / TOKENIZER

    def prompt(self, record: RolloutRecord) -> str:
        if record.messages:
            return text_of(split_conversation(record)[0])
        return self._decoded(record.tokens[: record.prompt_length])

    def completion(self, record: RolloutRecord) -> str:
        if record.messages:
            return text_of(split_conversation(record)[1])
        return self._decoded(record.tokens[record.prompt_length :])

    def _decoded(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return f"token ids: {' '.join(map(str, tokens))}"
        decoded: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return decoded

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        """Raises `BrokenRollouts`."""
        from tokenizers import Tokenizer

        if not self._file.exists():
            return None
        try:
            return Tokenizer.from_file(str(self._file))
        except Exception as error:  # the library raises no narrower one
            raise BrokenRollouts(f"{self._file}: {error}; remove this file") from error


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
    yield f"group {record.group}.{record.index}"
    if record.task:
        yield record.task
    yield f"score {number(record.score)}"
    yield from (f"{name} {number(value)}" for name, value in record.parts.items())
    if record.advantage is not None:
        yield f"advantage {record.advantage:+.3g}"
    ended = f" ({record.finish_reason})" if record.finish_reason else ""
    prompt = len(record.tokens) - record.completion_tokens
    yield f"tokens {prompt} + {record.completion_tokens}{ended}"
    if record.staleness is not None:
        yield f"staleness {record.staleness}"
    if (difference := record.mean_logprob_difference) is not None:
        yield f"|logprob difference| {difference:.1e}"


def number(value: float) -> str:
    return f"{value:.3g}"


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns. Wide characters count as two."""
    console = Console(width=width)
    safe = text.translate(_CONTROLS)
    return [
        part.plain.rstrip()
        for line in safe.split("\n")
        for part in Text(line).wrap(console, width, overflow="fold") or [Text()]
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
        prompt = record.item or tuple(record.tokens[: record.prompt_length])
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
