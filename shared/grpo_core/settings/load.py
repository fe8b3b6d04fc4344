"""Loads a command's settings: options override environment variables, which override a YAML file.

Nothing heavy is imported here: `--help` and a mistake answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError

from grpo_core.settings.command import Alias, Command, CommandSettings
from grpo_core.settings.messages import help_text, lines_of, name_of, resolved_yaml
from grpo_core.settings.options import Option, options_of
from grpo_core.settings.sources import ConfigFile, Given, merge, read_command_line, read_config_file

EXIT_USAGE = 2

VERSION = (Path(__file__).parents[1] / "VERSION").read_text(encoding="utf-8").strip()

S = TypeVar("S", bound=CommandSettings)


def load_settings(
    settings_type: type[S],
    argv: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    *,
    at_start: bool = False,
    dry_run_notes: Callable[[S], Iterable[str]] = lambda _settings: (),
) -> S:
    """Parse a command's settings. Options win over variables, and those over `--config FILE`.

    Args:
        at_start: check this machine too, as `--dry-run` does in any case
        dry_run_notes: lines that `--dry-run` prints after the values, as comments

    Raises:
        SystemExit: with status 2 and a line per mistake on stderr; with status 0 after `--help`,
            `--version` and `--dry-run`
    """
    command, options = settings_type.command, options_of(settings_type)
    line = read_command_line(command, options, argv)
    if "help" in line.common:
        _print_and_exit(help_text(settings_type, options))
    if "version" in line.common:
        _print_and_exit(f"{command.prog} {VERSION}\n")
    file = ConfigFile()
    if path := line.common.get("config"):
        file = read_config_file(settings_type, options, Path(path).expanduser())
    variables, problems = _variables(command, options, environment, line.values)
    _end_on_mistakes(command, [*line.problems, *file.problems, *problems])
    if ignored := [*file.without_effect, *line.without_effect]:
        sys.stderr.write(
            f"{command.prog}: ignored these options, which have no effect: {', '.join(ignored)}\n"
        )
    given = dict(file.values)
    merge(given, variables)
    merge(given, line.values)
    try:
        for message in settings_type.drop_unused(given, environment):
            sys.stderr.write(f"{command.prog}: {message}\n")
    except ValueError as error:
        _end_on_mistakes(command, [str(error)])
    values = {name: _expanded(options.get(name), found.value) for name, found in given.items()}
    if command.passes_on and line.passed_on:
        values[command.passes_on] = [*values.get(command.passes_on, ()), *line.passed_on]
    try:
        settings = settings_type.model_validate(values)
    except ValidationError as error:
        _end_on_mistakes(command, lines_of(error, command, options, given))
        raise  # not reached: a ValidationError has at least one line
    mistakes = [*settings.mistakes()]
    if at_start or "dry-run" in line.common:
        mistakes += settings.start_mistakes()
    _end_on_mistakes(
        command,
        (
            f"{name_of(command, options[name], given)}: {message}" if name else message
            for name, message in mistakes
        ),
    )
    if "dry-run" in line.common:
        notes = "".join(
            f"# {line}\n" for note in dry_run_notes(settings) for line in note.splitlines()
        )
        _print_and_exit(resolved_yaml(command, settings.resolved()) + notes)
    return settings


def _expanded(option: Option | None, value: Any) -> Any:
    """`~/model` → `/home/me/model`. A shell leaves `--model=~/model` as it is."""
    if option is None or option.kind not in (Path, str) or not isinstance(value, str):
        return value
    return os.path.expanduser(value) if value == "~" or value.startswith("~/") else value


def _variables(
    command: Command,
    options: Mapping[str, Option],
    environment: Mapping[str, str],
    on_command_line: Mapping[str, Given],
) -> tuple[dict[str, Given], list[str]]:
    """Values and problems. An empty variable counts as none: Compose passes on what a .env file
    leaves empty."""
    found: dict[str, Given] = {}
    problems: list[str] = []
    for field, option in options.items():
        shared = command.variable(field)
        if shared and (text := environment.get(shared)):
            found[field] = Given(text, shared)
            continue
        try:
            given = _by_name(command, field, environment) if command.env_prefix else []
        except ValueError as error:
            if field not in on_command_line:
                problems.append(str(error))
            continue
        if not given:
            continue
        found[field] = given[0]
        for other in given[1:]:
            if other.value != given[0].value and field not in on_command_line:
                values = "" if option.is_secret else f" ({given[0].value!r}, {other.value!r})"
                problems.append(
                    f"{given[0].name} and {other.name} name the same option, but their values "
                    f"differ{values}; unset one of them"
                )
    return found, problems


def _by_name(command: Command, field: str, environment: Mapping[str, str]) -> list[Given]:
    """The variables of an option and its aliases. One that yields is the only one, if any.

    Raises:
        ValueError: the value of an alias cannot be converted
    """
    names = {field: Alias(field)}
    names |= {name: alias for name in command.aliases if (alias := command.alias(name))}
    given = [
        (command.env_prefix + name.upper().replace("-", "_"), alias)
        for name, alias in names.items()
        if alias.field == field
    ]
    given = [(variable, alias) for variable, alias in given if environment.get(variable)]
    firm = [(variable, alias) for variable, alias in given if not alias.yields]
    return [_converted(variable, environment[variable], alias) for variable, alias in firm or given]


def _converted(variable: str, text: str, alias: Alias) -> Given:
    try:
        value = alias.convert(text) if alias.convert else text
    except ValueError as error:
        raise ValueError(f"{variable}: {error}") from None
    return Given(value, variable, alias.yields)


def _end_on_mistakes(command: Command, lines: Iterable[str]) -> None:
    mistakes = [f"{command.prog}: {line}\n" for line in lines]
    if mistakes:
        sys.stderr.write("".join(mistakes))
        raise SystemExit(EXIT_USAGE)


def _print_and_exit(text: str) -> NoReturn:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        sys.stderr.write(f"cannot write to standard output: {error.strerror}\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more at its end
        raise SystemExit(1) from None
    raise SystemExit(0)
