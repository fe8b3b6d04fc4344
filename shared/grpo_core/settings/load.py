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

from grpo_core.settings.command import Command, CommandSettings
from grpo_core.settings.messages import help_text, lines_of, name_of, resolved_yaml
from grpo_core.settings.options import Option, options_of
from grpo_core.settings.sources import Arguments, ConfigFile, Variables, merge

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
    line = Arguments(command, options, argv)
    if "help" in line.common:
        _print_and_exit(help_text(settings_type, options))
    if "version" in line.common:
        _print_and_exit(f"{command.prog} {VERSION}\n")
    path = line.common.get("config")
    file = ConfigFile(settings_type, options, Path(path).expanduser() if path else None)
    variables = Variables(command, options, environment, line.values)
    _end_on_mistakes(command, [*line.problems, *file.problems, *variables.problems])
    if ignored := [*file.without_effect, *line.without_effect]:
        sys.stderr.write(
            f"{command.prog}: ignored these options, which have no effect: {', '.join(ignored)}\n"
        )
    given = dict(file.values)
    merge(given, variables.values)
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
