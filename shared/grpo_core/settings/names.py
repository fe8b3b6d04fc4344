"""Finds options by name, and the existing name that is nearest to a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from grpo_core.settings.command import Command
from grpo_core.settings.options import COMMON, Option

NEAR_RATIO = 0.7
TYPO_RATIO = 0.8
TYPO_LENGTH = 1
"""How alike a misspelt name and an option of ours are. A name that is passed on must be nearer."""


class Found(NamedTuple):
    field: str
    convert: Callable[[Any], Any] | None = None
    is_negated: bool = False
    yields: bool = False
    is_flag: bool = False


class Names:
    """All names under which the options of a command are known, with dashes."""

    def __init__(self, command: Command, options: Mapping[str, Option]):
        self._command = command
        self._found: dict[str, Found] = {
            option.name: Found(option.field)
            for option in options.values()
            if option.field not in command.positional
        }
        for name in command.aliases:
            if alias := command.alias(name):
                self._found[name.replace("_", "-")] = Found(
                    alias.field, alias.convert, yields=alias.yields, is_flag=alias.is_flag
                )
        flags = [name for name, found in self._found.items() if options[found.field].is_flag]
        self._negated = {f"no-{name}": self._found[name] for name in flags}

    def find(self, name: str) -> Found | None:
        if name in self._negated:
            return self._negated[name]._replace(is_negated=True)
        return self._found.get(name)

    def unknown(self, name: str) -> str:
        """Tells what is wrong with a name that was not found, and what to write."""
        if reason := self._command.refused.get(name):
            return reason
        names = [*self._found, *self._negated, *COMMON]
        near = [
            f"--{found}" for found in difflib.get_close_matches(name, names, n=2, cutoff=NEAR_RATIO)
        ]
        return f"no such option; did you mean {' or '.join(near)}?" if near else "no such option"

    def one_typo_from(self, name: str) -> str | None:
        """The option that this name misspells. Nearly all names of other programs pass."""
        near = difflib.get_close_matches(name, self._found, n=1, cutoff=TYPO_RATIO)
        return next((found for found in near if abs(len(found) - len(name)) <= TYPO_LENGTH), None)
