"""Command lines of two parts: our own options, then `--`, then what is passed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PASS_ON = "--"


@dataclass(frozen=True)
class Arguments:
    own: list[str]
    passed_on: list[str]


def split_arguments(argv: Sequence[str]) -> Arguments:
    """Without a `--` everything is ours."""
    words = list(argv)
    end = words.index(PASS_ON) if PASS_ON in words else len(words)
    return Arguments(words[:end], words[end + 1 :])


def taken_flags(passed_on: Sequence[str], ours: Sequence[str]) -> list[str]:
    """The flags among `passed_on` that we set ourselves, so that both would be said."""
    given = {word.partition("=")[0].replace("_", "-") for word in passed_on}
    return sorted(given & set(ours))
