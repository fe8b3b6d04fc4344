"""Lists on the command line: several words after one option, commas, ranges."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

_PARTS = re.compile(r"[,\s]+")
_RANGE = re.compile(r"(\d+)-(\d+)")


def joined_lists(argv: Sequence[str], options: Collection[str]) -> list[str]:
    """`--lora-target-modules q_proj v_proj` → `--lora-target-modules q_proj,v_proj`.

    Args:
        options: those that take several words, as `--name-with-dashes`
    """
    joined: list[str] = []
    open_list = False
    for word in argv:
        if word.startswith("--"):
            joined.append(word)
            open_list = word.replace("_", "-") in options
        elif open_list and joined[-1].startswith("--"):
            joined.append(word)
        elif open_list:
            joined[-1] += f",{word}"
        else:
            joined.append(word)
    return joined


def names_in(text: str) -> tuple[str, ...]:
    """`q_proj v_proj` or `q_proj,v_proj`. Raises ValueError where there is none."""
    names = tuple(dict.fromkeys(part for part in _PARTS.split(text) if part))
    if not names:
        raise ValueError("expected at least one name")
    return names


def numbers_in(text: str) -> tuple[int, ...]:
    """`20-31`, `0,1,2`, `0-3,28-31`, in order and each once.

    Raises:
        ValueError: something else, or nothing.
    """
    numbers: set[int] = set()
    for part in filter(None, _PARTS.split(text)):
        found = _RANGE.fullmatch(part)
        first, last = (int(found[1]), int(found[2])) if found else (_number(part),) * 2
        if first > last:
            raise ValueError(f"{part}: a range goes from the lower to the higher number")
        numbers.update(range(first, last + 1))
    if not numbers:
        raise ValueError("expected numbers and ranges, for example 0-3,28-31")
    return tuple(sorted(numbers))


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r}: expected numbers and ranges, for example 0-3,28-31")
    return int(text)
