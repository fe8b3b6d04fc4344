"""Loads a command's settings: options override environment variables, which override a YAML file.

Nothing heavy is imported here: `--help` and a mistake answer at once.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError

from grpo_core.errors import GrpoError
from grpo_core.protocol import VERSION
from grpo_core.settings.command import Command, CommandSettings, Mistake
from grpo_core.settings.messages import (
    IS_REQUIRED,
    OF_ANOTHER,
    help_text,
    name_of,
    problems_by_field,
    resolved_yaml,
)
from grpo_core.settings.options import Option, options_of
from grpo_core.settings.sources import Found, Given, merge, read_config, read_variables, read_words

EXIT_USAGE = 2
_IN_FILE = re.compile(r"\S+\.(?:ya?ml|toml):(\d+): ")


S = TypeVar("S", bound=CommandSettings)


class OptionsInvalid(GrpoError):
    """Options do not exist, have no valid value, or exclude each other. `lines`: one for each."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = [*lines]


def load_settings(
    settings_type: type[S],
    argv: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    *,
    at_start: bool = False,
    below: Path | None = None,
    dry_run_notes: Callable[[S], Iterable[str]] = lambda _settings: (),
) -> S:
    """Parse a command's settings. Options win over variables, and those over `--config FILE`.

    Args:
        at_start: check this machine too, as `--dry-run` does in any case
        below: a file whose values all others win over
        dry_run_notes: lines that `--dry-run` prints after the values, as comments

    Raises:
        SystemExit: with status 2 and a line per mistake on stderr; with status 0 after `--help`,
            `--version` and `--dry-run`
    """
    command, options = settings_type.command, options_of(settings_type)
    common = read_words(command, options, argv).common
    if "help" in common:
        _print_and_exit(help_text(settings_type, options))
    if "version" in common:
        _print_and_exit(f"{command.prog} {VERSION}\n")
    is_dry = "dry-run" in common
    try:
        settings = parsed(
            settings_type, argv, environment, at_start=at_start or is_dry, below=below
        )
    except OptionsInvalid as error:
        sys.stderr.write("".join(f"{command.prog}: {line}\n" for line in error.lines))
        raise SystemExit(EXIT_USAGE) from None
    if is_dry:
        notes = "".join(
            f"# {line}\n" for note in dry_run_notes(settings) for line in note.splitlines()
        )
        _print_and_exit(resolved_yaml(command, settings.resolved()) + notes)
    return settings


def parsed(
    settings_type: type[S],
    argv: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    *,
    at_start: bool = False,
    below: Path | None = None,
) -> S:
    """Settings of a command line. Args: as of `load_settings`

    Raises:
        OptionsInvalid: with all mistakes
    """
    command, options = settings_type.command, options_of(settings_type)
    line = read_words(command, options, argv)
    path = line.common.get("config")
    file = read_config(settings_type, Path(path).expanduser()) if path else Found()
    if ignored := [*file.without_effect, *line.without_effect]:
        sys.stderr.write(
            f"{command.prog}: ignored these options, which have no effect: {', '.join(ignored)}\n"
        )
    given = (read_config(settings_type, below).values if below else {}) | file.values
    if command.passes_on and line.passed_on:
        words = given.get(command.passes_on, Given([], "")).value
        given[command.passes_on] = Given([*words, *line.passed_on], "")
    variables = read_variables(command, options, environment, line.values)
    merge(given, variables.values)
    merge(given, line.values)
    problems = [*line.problems, *file.problems, *variables.problems]
    return settings_of(settings_type, given, environment, at_start, problems)


def settings_of(
    settings_type: type[S],
    given: Mapping[str, Given],
    environment: Mapping[str, str] = MappingProxyType({}),
    at_start: bool = False,
    problems: Sequence[str] = (),
) -> S:
    """Settings of values that are at hand, by field. Notes for the user go to stderr.

    Args:
        environment: variables that a command may heed beside its options; see `drop_unused`
        at_start: check this machine too
        problems: mistakes that are known already

    Raises:
        OptionsInvalid: with all mistakes, under the names of `given`
    """
    try:
        return _checked(settings_type, given, environment, at_start, problems)
    except (OSError, RuntimeError) as error:
        # Other errors, such as a shared library that is missing, have no file's name.
        if not getattr(error, "filename", None) and "home directory" not in str(error):
            raise
        raise OptionsInvalid([*problems, _no_path(error, given)]) from None


def _no_path(error: OSError | RuntimeError, given: Mapping[str, Given]) -> str:
    """The problem of a path that no file can have: its name is too long, or it begins with `~` and
    the name of a user that does not exist."""
    path = str(getattr(error, "filename", None) or "~")
    named = [one.name for one in given.values() if one.value and path.startswith(str(one.value))]
    named += [one.name for one in given.values() if str(one.value).startswith(path)]
    problem = getattr(error, "strerror", None) or error
    return f"{named[0] if named else path[:80]}: {str(problem).rstrip('.')}; name another path"


def _checked(
    settings_type: type[S],
    given: Mapping[str, Given],
    environment: Mapping[str, str],
    at_start: bool,
    problems: Sequence[str],
) -> S:
    command, options = settings_type.command, options_of(settings_type)
    held = dict(given)
    try:
        for message in settings_type.drop_unused(held, environment):
            sys.stderr.write(f"{command.prog}: {message}\n")
    except ValueError as error:
        raise OptionsInvalid([*problems, str(error)]) from None
    values = {name: _expanded(options.get(name), found.value) for name, found in held.items()}
    mistakes: list[Mistake] = []
    try:
        settings = settings_type.model_validate(values)
    except ValidationError as error:
        mistakes += problems_by_field(error, options)
        invalid = {str(problem["loc"][0]) for problem in error.errors() if problem["loc"]}
        valid = {name: value for name, value in values.items() if name not in invalid}
        try:  # what the others get wrong is told too
            settings = settings_type.model_validate(valid)
        except ValidationError:
            told = _lines(_not_following(mistakes, problems), command, options, held)
            raise OptionsInvalid(_by_line([*problems, *told])) from None
    mistakes += settings.mistakes()
    if at_start:
        mistakes += settings.start_mistakes()
    own = _not_following(mistakes, problems)
    lines = [*dict.fromkeys(_lines(own, command, options, held))]
    if problems or lines:
        raise OptionsInvalid(_by_line([*problems, *lines]))
    return settings


def _not_following(mistakes: Sequence[Mistake], problems: Sequence[str]) -> list[Mistake]:
    return [one for one in mistakes if not (problems and one.message.startswith(OF_ANOTHER))]


def _by_line(told: Sequence[str]) -> list[str]:
    """Those about a file in the order of its lines, before the others."""
    found = {text: _IN_FILE.match(text) for text in told}
    return sorted(told, key=lambda text: int(at[1]) if (at := found[text]) else sys.maxsize)


def _lines(
    mistakes: Iterable[Mistake],
    command: Command,
    options: Mapping[str, Option],
    given: Mapping[str, Given],
) -> Iterator[str]:
    """Under the names that the user wrote."""
    for field, message in mistakes:
        if field is None:
            yield message
        else:
            separator = "" if message.startswith(IS_REQUIRED) else ":"
            yield f"{name_of(command, options[field], given)}{separator} {message}"


def mistakes_of(
    settings_type: type[CommandSettings],
    values: Mapping[str, Any],
    at_start: bool,
    environment: Mapping[str, str] = os.environ,
) -> Iterator[Mistake]:
    """What a command would refuse if it was started here with these values, by field.

    Args:
        values: they win over the variables that the command reads
        at_start, environment: as of `load_settings`
    """
    command, options = settings_type.command, options_of(settings_type)
    given = read_variables(command, options, environment, values).values
    given |= {name: Given(value, name) for name, value in values.items() if value is not None}
    for _ in settings_type.drop_unused(given, environment):
        pass
    try:
        settings = settings_type.model_validate({name: held.value for name, held in given.items()})
    except ValidationError as error:
        yield from problems_by_field(error, options)
        return
    yield from settings.mistakes()
    if at_start:
        yield from settings.start_mistakes()


def _expanded(option: Option | None, value: Any) -> Any:
    """`~/model` → `/home/me/model`. A shell leaves `--model=~/model` as it is."""
    if option is None or option.kind not in (Path, str) or not isinstance(value, str):
        return value
    return os.path.expanduser(value) if value == "~" or value.startswith("~/") else value


def _print_and_exit(text: str) -> NoReturn:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        sys.stderr.write(f"cannot write to standard output: {error.strerror}\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more at its end
        raise SystemExit(1) from None
    raise SystemExit(0)
