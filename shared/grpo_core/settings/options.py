"""Options of a command, in the form that `--help`, the parser and error messages use."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, Field, SecretStr
from pydantic.fields import FieldInfo

from grpo_core.settings.command import Alias, Command, CommandSettings, Shown

COMMON = ("config", "dry-run", "version", "help")
"""Options of every command, which no model holds."""

_METAVARS = {
    "_s": "SECONDS",
    "_bytes": "BYTES",
    "_mib": "MIB",
    "url": "URL",
    "port": "PORT",
    "model": "MODEL",
    "_token": "TOKEN",
    "_key": "KEY",
}
_BY_TYPE: Mapping[Any, tuple[str, str]] = {
    int: ("INT", "a whole number"),
    float: ("NUMBER", "a number"),
    Path: ("PATH", "a path"),
    bool: ("", "true or false"),
}
_BOUNDS = (
    (annotated_types.Ge, "at least {}"),
    (annotated_types.Gt, "greater than {}"),
    (annotated_types.Le, "at most {}"),
    (annotated_types.Lt, "less than {}"),
)


@dataclass(frozen=True)
class Option:
    field: str
    info: FieldInfo
    own_default: str | None = None
    """Text that a command shows in the place of the field's default."""

    @property
    def name(self) -> str:
        return self.field.replace("_", "-")

    @cached_property
    def kind(self) -> Any:
        """The type of one value: without None, and of a list that of its items."""
        return _item(self.info.annotation)[0]

    @property
    def is_flag(self) -> bool:
        return self.kind is bool

    @cached_property
    def is_list(self) -> bool:
        return _item(self.info.annotation)[1]

    @property
    def is_mapping(self) -> bool:
        """Whether a section of a file is its value."""
        return get_origin(self.kind) is dict

    @cached_property
    def width(self) -> int | None:
        """Number of values of a tuple of fixed length, which an option takes as so many words."""
        return _width(self.info.annotation)

    @property
    def is_secret(self) -> bool:
        return self.kind is SecretStr

    @property
    def choices(self) -> tuple[Any, ...]:
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def shown(self) -> Shown:
        return next((data for data in self.info.metadata if isinstance(data, Shown)), Shown())

    @property
    def metavar(self) -> str:
        if self.shown.metavar:
            return self.shown.metavar
        if self.choices:
            return "{" + ",".join(map(str, self.choices)) + "}"
        for ending, metavar in _METAVARS.items():
            if self.field.endswith(ending):
                return metavar
        return _BY_TYPE.get(self.kind, ("TEXT", ""))[0]

    @property
    def default(self) -> str | None:
        """None if the option is required."""
        if self.info.is_required():
            return self.own_default
        return (
            self.own_default
            or self.shown.default
            or default_text(self.info.get_default(call_default_factory=True))
        )

    @property
    def expected(self) -> str:
        """For a message: `a whole number, at least 1`."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        bounds = [
            text.format(plain_number(getattr(data, kind.__name__.lower())))
            for kind, text in _BOUNDS
            for data in self.info.metadata
            if isinstance(data, kind)
        ]
        noun = _BY_TYPE.get(self.kind, ("", "text"))[1]
        return ", ".join([noun, " and ".join(bounds)]) if bounds else noun


def options_of(settings_type: type[CommandSettings]) -> dict[str, Option]:
    """By field, in the order of the groups, without the field for words that are passed on."""
    command = settings_type.command
    fields = settings_type.model_fields
    named = [name for names in command.groups.values() for name in names]
    order = dict.fromkeys([*command.positional, *named, *fields])
    return {
        name: Option(name, fields[name], command.defaults.get(name))
        for name in order
        if name != command.passes_on and name not in command.left_out
    }


def option_of(view: type[BaseModel], option: str, **changes: Any) -> Any:
    """The option of a service: its bounds, default and description, but for `changes`."""
    known = view.model_fields[option]
    info: Any = Field(**{"default": known.default, "description": known.description} | changes)
    info.metadata = [*known.metadata]
    return info


def default_text(value: Any) -> str:
    if value is None or value in ("", (), []):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if isinstance(value, SecretStr):
        return "not shown"
    return plain_number(value) if isinstance(value, int | float) else str(value)


def plain_number(value: float) -> str:
    """`1e-5` for 1e-05 and `60` for 60.0."""
    text = str(value) if isinstance(value, int) else f"{value:.10g}"
    return re.sub(r"e([-+])0+", r"e\1", text)


def _item(annotation: Any) -> tuple[Any, bool]:
    """The type of one value, and if there may be several."""
    if get_origin(annotation) is Annotated:
        return _item(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return _item(next(_without_none(annotation)))
    if get_origin(annotation) in (list, tuple):
        return _item(get_args(annotation)[0])[0], True
    return annotation, False


def _width(annotation: Any) -> int | None:
    if get_origin(annotation) in (Union, UnionType):
        return _width(next(_without_none(annotation)))
    items = get_args(annotation)
    return len(items) if get_origin(annotation) is tuple and Ellipsis not in items else None


def _without_none(annotation: Any) -> Iterator[Any]:
    return (kind for kind in get_args(annotation) if kind is not NoneType)


def negated(name: str) -> str:
    """`report` → `no-report`, `env.use-wandb` → `env.no-use-wandb`."""
    section, dot, plain = name.rpartition(".")
    return f"{section}{dot}no-{plain}"


NEAR_RATIO = 0.7
TYPO_RATIO = 0.8
TYPO_LENGTH = 1
"""How alike a misspelt name and an option of ours are. A name that is passed on must be nearer."""

OF_TRL = {
    "beta": "kl-coef",
    "epsilon": "clip-eps",
    "learning-rate": "lr",
    "max-completion-length": "max-completion-tokens",
    "max-steps": "steps",
    "num-generations": "group-size",
    "per-device-train-batch-size": "batch-size",
    "reward-funcs": "task",
}
"""Names of TRL's options, and of ours with the same meaning."""


class Names:
    """All names under which the options of a command are known, with dashes."""

    def __init__(self, command: Command, options: Mapping[str, Option]):
        self._command = command
        self._found = {
            option.name: Alias(option.field)
            for option in options.values()
            if option.field not in command.positional
        }
        for name in command.aliases:
            if alias := command.alias(name):
                self._found[name.replace("_", "-")] = alias
        self._negated = {
            negated(name): replace(found, is_negated=True)
            for name, found in self._found.items()
            if options[found.field].is_flag
        }

    def find(self, name: str) -> Alias | None:
        return self._negated.get(name) or self._found.get(name)

    def unknown(self, name: str) -> str:
        """Tells what is wrong with a name that was not found, and what to write."""
        if reason := self._command.refused.get(name):
            return reason
        section, dot, typed = name.rpartition(".")
        plain = OF_TRL.get(typed, typed)
        if elsewhere := self._found.get(plain):
            titles = (t for t, names in self._command.groups.items() if elsewhere.field in names)
            field = elsewhere.field.replace("_", "-")
            right = f"{next(titles)}.{field}" if section and self._command.sections else plain
            return f"no such option; did you mean --{right}?"
        begin = section + dot
        names = [*self._found, *self._negated, *COMMON]
        beside = [
            known.removeprefix(begin)
            for known in names
            if known.startswith(begin) and "." not in known.removeprefix(begin)
        ]
        close = difflib.get_close_matches(plain, beside, n=2, cutoff=NEAR_RATIO)
        near = [f"--{begin}{found}" for found in close] or [
            f"--{found}"  # of a section whose name is misspelt
            for found in difflib.get_close_matches(name, self._found, n=1, cutoff=TYPO_RATIO)
        ]
        return f"no such option; did you mean {' or '.join(near)}?" if near else "no such option"

    def is_passed_on(self, name: str) -> bool:
        """Whether an unknown option begins with `passes_on_below`, and is not one of ours with a
        typing mistake."""
        below = self._command.passes_on_below
        is_ours = name in self._command.refused or self.one_typo_from(name) is not None
        return bool(below) and name.startswith(below) and not is_ours

    def one_typo_from(self, name: str) -> str | None:
        """The option that this name misspells. Nearly all names of other programs pass."""
        near = difflib.get_close_matches(name, self._found, n=1, cutoff=TYPO_RATIO)
        return next((found for found in near if abs(len(found) - len(name)) <= TYPO_LENGTH), None)
