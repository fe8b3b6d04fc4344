"""Recorded sequences as text for a terminal. Lines fit its width and hold no control characters."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

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
        return self._decoded(record.tokens[: prompt_length(record)])

    def completion(self, record: RolloutRecord) -> str:
        if record.messages:
            return text_of(split_conversation(record)[1])
        return self._decoded(record.tokens[prompt_length(record) :])

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


def prompt_length(record: RolloutRecord) -> int:
    """Number of tokens before the first trained one."""
    return record.mask.index(1) if 1 in record.mask else len(record.tokens)


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
