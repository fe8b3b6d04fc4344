"""Reads values of options: the words of a command line, and the YAML file of `--config`."""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from grpo_core.settings.command import Command, CommandSettings
from grpo_core.settings.options import COMMON, Found, Names, Option

BOOLEANS = ("true", "false", "yes", "no", "on", "off", "1", "0")
_NOT = {"true": "false", "false": "true"}


class Given(NamedTuple):
    """A value and the name it was given under, for messages: an option, a variable or a key.
    `yields`: see `Alias`."""

    value: Any
    name: str
    yields: bool = False


def merge(values: dict[str, Given], more: Mapping[str, Given]) -> None:
    """Add values that win over the earlier ones, unless they yield."""
    for name, given in more.items():
        if name not in values or values[name].yields or not given.yields:
            values[name] = given


@dataclass
class CommandLine:
    """`common`: values of the options that every command has."""

    values: dict[str, Given] = field(default_factory=dict)
    common: dict[str, str] = field(default_factory=dict)
    passed_on: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_command_line(
    command: Command, options: Mapping[str, Option], argv: Sequence[str]
) -> CommandLine:
    return _Reader(command, options, argv).read()


class _Reader:
    def __init__(self, command: Command, options: Mapping[str, Option], argv: Sequence[str]):
        self._command = command
        self._options = options
        self._names = Names(command, options)
        self._positional = deque(command.positional)
        self._words = deque(argv)
        self._read = CommandLine()

    def read(self) -> CommandLine:
        while self._words:
            word = self._words.popleft()
            if word in ("-h", "--help"):
                self._read.common["help"] = ""
            elif word == "--" and self._command.passes_on is not None:
                self._read.passed_on += self._words
                self._words.clear()
            elif word.startswith("-") and word != "-":
                self._option(word)
            else:
                self._word(word)
        return self._read

    def _option(self, word: str) -> None:
        typed, separator, value = word.partition("=")
        name = typed.removeprefix("--").replace("_", "-")
        inline = value if separator else None
        if name in COMMON:
            self._common(typed, name, inline)
            return
        if name in self._command.without_effect:
            self._read.without_effect.append(typed)
            if inline is None and self._next_is_value():
                self._words.popleft()
            return
        found = self._names.find(name)
        if found is None:
            self._unknown(word, typed, name)
            return
        option = self._options[found.field]
        given = self._given(option, typed, inline, found)
        if given is None:
            return
        try:
            if found.convert is not None:
                given = found.convert(given)
        except ValueError as error:
            self._read.problems.append(f"{typed}: {error}")
            return
        earlier = self._read.values.get(option.field)
        if option.is_list and earlier is not None:
            given = [*earlier.value, *given]
        merge(self._read.values, {option.field: Given(given, typed, found.yields)})

    def _common(self, typed: str, name: str, inline: str | None) -> None:
        if name == "config":
            value = self._value(typed, inline)
            if value == "":
                self._read.problems.append(f"{typed}: expected the path of a file; got ''")
            self._read.common[name] = value or ""
        elif inline is None:
            self._read.common[name] = ""
        else:
            self._read.problems.append(f"{typed}={inline}: {typed} takes no value")

    def _given(self, option: Option, typed: str, inline: str | None, found: Found) -> Any:
        if option.is_flag or found.is_flag:
            if inline is None and self._words and self._words[0].lower() in BOOLEANS:
                inline = self._words.popleft()
            value = (inline or "true").lower()
            return _NOT.get(value, value) if found.is_negated else value
        first = self._value(typed, inline)
        if first is None or not option.is_list:
            return first
        values = [first]
        # A command with positional arguments could not tell them from further values.
        most = option.width or (1 if self._command.positional else None)
        while inline is None and self._next_is_value() and (most is None or len(values) < most):
            values.append(self._words.popleft())
        return values

    def _value(self, typed: str, inline: str | None) -> str | None:
        if inline is not None:
            return inline
        if self._next_is_value():
            return self._words.popleft()
        hint = f"; write {typed}=VALUE if the value begins with --" if self._words else ""
        self._read.problems.append(f"{typed}: expected a value after it{hint}")
        return None

    def _next_is_value(self) -> bool:
        return bool(self._words) and not self._words[0].startswith("--")

    def _unknown(self, word: str, typed: str, name: str) -> None:
        if self._command.passes_on is None:
            self._read.problems.append(f"{typed}: {self._names.unknown(name)}")
        elif name not in self._command.others and (near := self._names.one_typo_from(name)):
            self._read.problems.append(f"{typed}: no such option; did you mean --{near}?")
        else:
            self._read.passed_on.append(word)
            return
        if "=" not in word and self._next_is_value():
            self._words.popleft()

    def _word(self, word: str) -> None:
        if self._command.passes_on is not None:
            self._read.passed_on.append(word)
        elif self._positional:
            name = self._positional[0]
            if self._options[name].is_list:
                earlier = self._read.values.get(name, Given([], ""))
                self._read.values[name] = Given([*earlier.value, word], name.upper())
            else:
                self._read.values[self._positional.popleft()] = Given(word, name.upper())
        else:
            self._read.problems.append(f"{word!r}: unexpected; every option begins with --")


@dataclass
class ConfigFile:
    values: dict[str, Given] = field(default_factory=dict)
    without_effect: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_config_file(
    settings_type: type[CommandSettings], options: Mapping[str, Option], path: Path
) -> ConfigFile:
    import yaml

    read = ConfigFile()
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        read.problems.append(f"--config: cannot read {path}: {error.strerror}")
        return read
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        read.problems.append(f"--config: {path} is not YAML: {_in_one_line(error)}")
        return read
    if not isinstance(content, dict):
        read.problems.append(f"--config: {path}: expected lines such as `batch-size: 8`")
        return read
    try:
        content = settings_type.prepare_file(_with_words(content, settings_type.command.passes_on))
    except ValueError as error:
        read.problems.append(f"--config: {path}: {error}")
        return read
    _read_keys(settings_type.command, options, path, content, read)
    return read


def _with_words(content: Mapping[Any, Any], passes_on: str | None) -> dict[Any, Any]:
    """`engine-arguments: --seed 3` → `engine-arguments: [--seed, "3"]`, split as a shell does.

    Raises:
        ValueError: the string is not words of a shell
    """
    return {
        key: _words(key, value)
        if str(key).replace("-", "_") == passes_on and isinstance(value, str)
        else value
        for key, value in content.items()
    }


def _words(key: str, value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ValueError(
            f"{key}: cannot split the value into words as a shell does ({error}); check its quotes"
        ) from None


def _read_keys(
    command: Command,
    options: Mapping[str, Option],
    path: Path,
    content: Mapping[Any, Any],
    read: ConfigFile,
) -> None:
    names = Names(command, options)
    for key, value in _flat(content):
        name = key.replace("_", "-")
        if name in command.without_effect or name.partition(".")[0] in command.without_effect:
            read.without_effect.append(key)
            continue
        found = names.find(name)
        field_name = found.field if found else name.replace("-", "_")
        if found is None and field_name not in (*command.positional, command.passes_on):
            read.problems.append(f"{path}: {key}: {names.unknown(name).replace('--', '')}")
        elif value is not None:
            try:
                given = found.convert(value) if found and found.convert else value
            except ValueError as error:
                read.problems.append(f"{path}: {key}: {error}")
                continue
            yields = found is not None and found.yields
            merge(read.values, {field_name: Given(given, f"{path}: {key}", yields)})


def _flat(content: Mapping[Any, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """`{env: {seed: 1}}` → `env.seed`, 1."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{section}{key}.")
        else:
            yield f"{section}{key}", value


def _in_one_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark else ""
    return where + " ".join(str(getattr(error, "problem", None) or error).split())
