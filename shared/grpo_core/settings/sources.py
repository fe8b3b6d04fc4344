"""Reads values of options: the words of a command line, variables, and the file of `--config`."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from grpo_core.service_url import hide_passwords
from grpo_core.settings.command import Alias, Command, CommandSettings
from grpo_core.settings.options import COMMON, Names, Option, negated, options_of

_TOML_SECTION = re.compile(r"\s*\[([\w.-]+)\]")
_TOML_KEY = re.compile(r"\s*([\w.-]+)\s*=")
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
class Found:
    """What a source gives.

    Args:
        values: by field
        without_effect: names of options that are accepted and ignored
        problems: lines for the user
    """

    values: dict[str, Given] = field(default_factory=dict)
    without_effect: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class Line(Found):
    """A command line. `common`: values of the options that every command has. `passed_on`: words
    for another program."""

    common: dict[str, str] = field(default_factory=dict)
    passed_on: list[str] = field(default_factory=list)


def read_words(command: Command, options: Mapping[str, Option], argv: Sequence[str]) -> Line:
    """What a command line gives."""
    return _Words(command, options, argv).read()


class _Words:
    def __init__(
        self, command: Command, options: Mapping[str, Option], argv: Sequence[str]
    ) -> None:
        self._command, self._options = command, options
        self._names = Names(command, options)
        self._positional = deque(command.positional)
        self._words = deque(argv)
        self._line = Line()

    def read(self) -> Line:
        command, line = self._command, self._line
        while self._words:
            word = self._words.popleft()
            if word in ("-h", "--help"):
                line.common["help"] = ""
            elif word == "--" and command.passes_on is not None:
                if not command.passes_on_below:  # otherwise it only separates
                    line.passed_on += self._words
                    self._words.clear()
            elif word.startswith("-") and word != "-":
                self._option(word)
            else:
                self._word(word)
        return line

    def _option(self, word: str) -> None:
        typed, separator, value = word.partition("=")
        name = typed.removeprefix("--").replace("_", "-")
        inline = value if separator else None
        if name in COMMON:
            self._common(typed, name, inline)
        elif name in self._command.without_effect:
            self._line.without_effect.append(typed)
            if inline is None and self._next_is_value():
                self._words.popleft()
        elif found := self._names.find(name):
            self._known(typed, inline, found)
        else:
            self._unknown(word, typed, name)

    def _known(self, typed: str, inline: str | None, found: Alias) -> None:
        option, values = self._options[found.field], self._line.values
        read = self._read(option, typed, inline, found)
        if read is None:
            return
        try:
            given = _converted(found, typed, read)
        except ValueError as error:
            self._line.problems.append(str(error))
            return
        earlier = values.get(option.field)
        if option.is_list and earlier is not None:
            given = given._replace(value=[*earlier.value, *given.value])
        merge(values, {option.field: given})

    def _common(self, typed: str, name: str, inline: str | None) -> None:
        if name == "config":
            value = self._value(typed, inline)
            if value == "":
                self._line.problems.append(f"{typed}: expected the path of a file; got ''")
            self._line.common[name] = value or ""
        elif inline is None:
            self._line.common[name] = ""
        else:
            self._line.problems.append(f"{typed}={inline}: {typed} takes no value")

    def _read(self, option: Option, typed: str, inline: str | None, found: Alias) -> Any:
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
        self._line.problems.append(f"{typed}: expected a value after it{hint}")
        return None

    def _next_is_value(self) -> bool:
        return bool(self._words) and not self._words[0].startswith("--")

    def _unknown(self, word: str, typed: str, name: str) -> None:
        below = self._command.passes_on_below
        if self._names.is_passed_on(name):
            self._line.passed_on += self._with_values(f"--{word.removeprefix('--')[len(below) :]}")
            return
        if self._command.passes_on is None or below:
            self._line.problems.append(f"{typed}: {self._names.unknown(name)}")
        elif name not in self._command.others and (near := self._names.one_typo_from(name)):
            self._line.problems.append(f"{typed}: no such option; did you mean --{near}?")
        else:
            self._line.passed_on.append(word)
            return
        if "=" not in word and self._next_is_value():
            self._words.popleft()

    def _with_values(self, option: str) -> Iterator[str]:
        yield option
        while "=" not in option and self._next_is_value():
            yield self._words.popleft()

    def _word(self, word: str) -> None:
        if self._command.passes_on is not None and not self._command.passes_on_below:
            self._line.passed_on.append(word)
        elif self._positional:
            name = self._positional[0]
            if self._options[name].is_list:
                earlier = self._line.values.get(name, Given([], ""))
                self._line.values[name] = Given([*earlier.value, word], name.upper())
            else:
                self._line.values[self._positional.popleft()] = Given(word, name.upper())
        else:
            self._line.problems.append(f"{word!r}: unexpected; every option begins with --")


def read_variables(
    command: Command,
    options: Mapping[str, Option],
    environment: Mapping[str, str],
    on_command_line: Container[str],
) -> Found:
    """An empty variable counts as none: Compose passes on what a .env file leaves empty. A secret
    may also be in a file, which a variable with `_FILE` at the end of its name names.

    Args:
        on_command_line: fields whose variables cause no problem
    """
    found = Found()
    aliases = {
        variable: alias
        for name in command.aliases
        if environment.get(variable := _variable(command, name)) and (alias := command.alias(name))
    }
    for field_, option in options.items():
        shared = command.variable(field_)
        own = shared or (command.env_prefix and f"{command.env_prefix}{field_.upper()}")
        has_file = option.is_secret and own and environment.get(f"{own}_FILE")
        try:
            if shared and (text := environment.get(shared)):
                given: Given | None = Given(text, shared)
            elif has_file and not environment.get(own):
                given = _in_file(f"{own}_FILE", environment)
            else:
                given = _by_name(command, option, environment, aliases)
        except ValueError as error:
            found.problems += [] if field_ in on_command_line else [str(error)]
            continue
        if given is not None:
            found.values[field_] = given
    return found


def _in_file(variable: str, environment: Mapping[str, str]) -> Given | None:
    """A secret; None if the file is empty. Raises `ValueError`, with a message for the user."""
    path = environment[variable]
    try:
        text = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "not text")
        raise ValueError(
            f"{variable}={path}: {why}; name a file that contains only the secret"
        ) from None
    return Given(text, variable) if text else None


def _variable(command: Command, name: str) -> str:
    return command.env_prefix + name.upper().replace("-", "_")


def _by_name(
    command: Command, option: Option, environment: Mapping[str, str], aliases: Mapping[str, Alias]
) -> Given | None:
    """Of the variables of an option and its aliases, of which one that yields counts only alone.

    Args:
        aliases: of all options, by their variables, as far as these are set

    Raises:
        ValueError: they differ, or the value cannot be converted; with a message for the user
    """
    if not command.env_prefix:
        return None
    own = _variable(command, option.field)
    set_ones = {own: Alias(option.field)} if environment.get(own) else {}
    set_ones |= {name: alias for name, alias in aliases.items() if alias.field == option.field}
    firm = {variable: alias for variable, alias in set_ones.items() if not alias.yields}
    found = [
        _converted(alias, variable, environment[variable])
        for variable, alias in (firm or set_ones).items()
    ]
    for other in found[1:]:
        if other.value != (first := found[0]).value:
            shown = hide_passwords(f" ({first.value!r}, {other.value!r})")
            values = "" if option.is_secret else shown
            raise ValueError(
                f"{first.name} and {other.name} are one option, but differ{values}; unset one"
            )
    return found[0] if found else None


def read_keys(
    settings_type: type[CommandSettings],
    given: Iterable[tuple[str, Any, str]],
    dashes: str = "--",
) -> Found:
    """Values by keys: names of options, with dashes or underscores.

    Args:
        given: key, value, and the name of the key in messages
        dashes: what other keys begin with, in messages
    """
    command = settings_type.command
    found, names = Found(), Names(command, options_of(settings_type))
    for key, value, where in given:
        name = key.replace("_", "-")
        alias = names.find(name) or Alias(name.replace("-", "_"))
        if name in command.without_effect or name.partition(".")[0] in command.without_effect:
            found.without_effect.append(key)
        elif names.find(name) is None and command.passes_on and names.is_passed_on(name):
            words = as_words(name.removeprefix(command.passes_on_below), value)
            earlier = found.values.get(command.passes_on, Given([], ""))
            found.values[command.passes_on] = Given([*earlier.value, *words], where)
        elif not names.find(name) and alias.field not in (*command.positional, command.passes_on):
            found.problems.append(f"{where}: {names.unknown(name).replace('--', dashes)}")
        elif value is not None:
            _add(found, alias, where, value)
    return found


def _add(found: Found, alias: Alias, name: str, value: Any) -> None:
    try:
        given = _converted(alias, name, value)
    except ValueError as error:
        found.problems.append(str(error))
        return
    first = found.values.get(alias.field, given)
    if first.value != given.value and not (first.yields or given.yields):
        found.problems.append(f"{name}: {first.name} is the same option; omit one of them")
    merge(found.values, {alias.field: given})


def read_config(settings_type: type[CommandSettings], path: Path) -> Found:
    """What a YAML or TOML file gives. Its keys are option names, or sections of them."""
    command = settings_type.command
    try:
        content, lines = read_file(path)
    except ValueError as error:
        return Found(problems=[f"--config: {error}"])
    try:
        prepared = settings_type.prepare_file(_with_words(content, command.passes_on))
    except ValueError as error:
        return Found(problems=[f"--config: {path}: {error}"])

    def where(key: str) -> str:
        return f"{path}:{lines[key]}: {key}" if key in lines else f"{path}: {key}"

    names = Names(command, options_of(settings_type))
    pairs = [*flat(settings_type, prepared)]
    found = read_keys(settings_type, [(key, value, where(key)) for key, value in pairs], dashes="")
    found.problems += [
        f"{where(name)}: expected a section, with an option on each line"
        for name, value in prepared.items()
        if command.sections and name in command.groups and not isinstance(value, dict | None)
        if not names.find(name)
    ]
    return found


def flat(
    settings_type: type[CommandSettings], content: Mapping[Any, Any], section: str = ""
) -> Iterator[tuple[str, Any]]:
    """`{env: {seed: 1}}` → `env.seed`, 1. An option whose value is a mapping keeps it."""
    options = options_of(settings_type)
    names = Names(settings_type.command, options)
    for key, value in content.items():
        name = f"{section}{key}"
        found = names.find(name.replace("_", "-"))
        if isinstance(value, dict) and not (found and options[found.field].is_mapping):
            yield from flat(settings_type, value, f"{name}.")
        elif section or found or name not in settings_type.command.groups:
            yield name, value


def _converted(alias: Alias, name: str, value: Any) -> Given:
    """Raises `ValueError`, whose message begins with the name."""
    try:
        return Given(alias.convert(value) if alias.convert else value, name, alias.yields)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def read_file(path: Path) -> tuple[dict[Any, Any], dict[str, int]]:
    """The content of a YAML or TOML file with options, and the line of each dotted key.

    Raises:
        ValueError: it cannot be read, or is no such file; with a message for the user
    """
    import yaml

    kind = "TOML" if path.suffix == ".toml" else "YAML"
    try:
        text = path.read_text(encoding="utf-8")
        if kind == "TOML":
            content, lines = tomllib.loads(text), _lines_of_toml(text)
        else:
            content, lines = yaml.safe_load(text), {}
            if isinstance(content, dict):
                lines = _lines_of(yaml.compose(text))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        at = f"line {mark.line + 1}: " if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ValueError(f"{path} is not {kind}: {at}{problem}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except (LookupError, AttributeError, TypeError, RecursionError) as error:
        # of PyYAML: a tag such as !!int before another text, a thousand brackets, a loop
        raise ValueError(f"{path} is not {kind}: {type(error).__name__}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected lines such as `batch-size: 8`")
    return content, lines


def _lines_of(node: Any, section: str = "") -> dict[str, int]:
    """Args: node: a mapping as yaml.compose returns it

    Raises:
        ValueError: a key stands twice, of which YAML would take the last one
    """
    found: dict[str, int] = {}
    for key, value in node.value:
        name, line = f"{section}{key.value}", key.start_mark.line + 1
        if name in found:
            raise ValueError(f"line {line}: {name} stands in line {found[name]} too")
        found[name] = line
        if value.id == "mapping":
            found |= _lines_of(value, f"{name}.")
    return found


def _lines_of_toml(text: str) -> dict[str, int]:
    """tomllib tells no lines, so each is found by its key."""
    found, section = {}, ""
    for number, line in enumerate(text.splitlines(), 1):
        if heading := _TOML_SECTION.match(line):
            section = f"{heading[1]}."
        elif key := _TOML_KEY.match(line):
            found[section + key[1]] = number
    return found


def as_words(name: str, value: Any) -> list[str]:
    """`block-size: 32` of a file → `--block-size=32`. A mapping becomes JSON."""
    if isinstance(value, dict):
        return [f"--{name}={json.dumps(value)}"]
    if value is None or isinstance(value, bool):
        return [] if value is None else [f"--{name if value else negated(name)}"]
    return [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]


def _with_words(content: Mapping[Any, Any], passes_on: str | None) -> dict[Any, Any]:
    """`engine-arguments: --seed 3` → `engine-arguments: [--seed, "3"]`, split as a shell does.

    Raises:
        ValueError: the string is not words of a shell
    """
    found = dict(content)
    for key, value in content.items():
        if str(key).replace("-", "_") == passes_on and isinstance(value, str):
            try:
                found[key] = shlex.split(value)
            except ValueError as error:
                raise ValueError(f"{key}: not words of a shell ({error}); check quotes") from None
    return found
