"""Options that a command passes on to a service, such as `--env.weight 3`: read as words or as a
section of a file, and checked in this process by the settings of that service."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_core.settings import CommandSettings, Given, OptionsInvalid, settings_of
from grpo_core.settings.options import options_of
from grpo_core.settings.sources import Arguments, read_file
from grpo_runs.run_directory import RunDirectory

TRAINER, SERVER, ENV = "trainer", "server", "env"
SERVICES = (TRAINER, SERVER, ENV)

Options = dict[str, tuple[str, ...]]
"""Words of the value by option name; an option without a value has none."""
_OPTION = re.compile(rf"--({'|'.join(SERVICES)})\.([^=]+)(=.*)?", re.DOTALL)


class UnexpectedWord(ValueError):
    """A word of the command line is not an option of a service. Its text is that word."""


def by_service(words: Iterable[str]) -> dict[str, Options]:
    """`--server.seed 3 --env.weight=3` → `{"server": {"seed": ("3",)}, "env": {"weight": ("3",)}}`.

    Of an option that is given twice, the last one counts.

    Raises:
        UnexpectedWord: a word is neither an option of a service nor a value of one
    """
    found: dict[str, Options] = {}
    open_option: tuple[str, str] | None = None
    for word in words:
        if match := _OPTION.fullmatch(word):
            service, name, value = match[1], match[2].replace("_", "-"), match[3]
            options = found.setdefault(service, {})
            options.pop(name, None)
            options[name] = () if value is None else (value[1:],)
            open_option = (service, name) if value is None else None
        elif open_option and not word.startswith("--"):
            service, name = open_option
            found[service][name] += (word,)
        else:
            raise UnexpectedWord(word)
    return found


def words_of(options: Mapping[str, tuple[str, ...]]) -> list[str]:
    """As the service itself takes them."""
    words: list[str] = []
    for name, values in options.items():
        words += [f"--{name}={values[0]}"] if len(values) == 1 else [f"--{name}", *values]
    return words


def in_sections(content: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Split the content of a file into words for services and the rest.

    Sections `env: {weight: 3}` and keys `env.weight: 3` mean the same.

    Raises:
        ValueError: a section has no options; with a message for the user
    """
    words: list[str] = []
    rest: dict[str, Any] = {}
    for key, value in content.items():
        service, dot, name = str(key).partition(".")
        if service not in SERVICES:
            rest[key] = value
        elif dot or isinstance(value, Mapping):
            for option, held in ({name: value} if dot else value).items():
                words += _words(f"{service}.{option}", held)
        else:
            raise ValueError(
                f"{key}: expected a section with one option per line, for example "
                "`max-staleness: 4`"
            )
    return words, rest


def _words(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        service, _, option = name.partition(".")
        return [f"--{name}" if value else f"--{service}.no-{option}"]
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return [f"--{name}", *map(str, value)]
    text = json.dumps(value) if isinstance(value, Mapping | list) else str(value)
    return [f"--{name}={text}"]


def mistakes_in(
    service: str,
    options: Options,
    view: type[CommandSettings],
    values: Mapping[str, Given],
    refused: Mapping[str, str],
    *,
    at_start: bool = False,
) -> Iterator[str]:
    """Lines about options for a service, with the names that the user typed.

    Args:
        view: the settings of the service
        values: what the command itself gives the service, by field
        refused: fields and other options that the command sets, and what to do instead
        at_start: check this machine too
    """
    line = Arguments(view.command, options_of(view), words_of(options))
    typed = {
        field: found._replace(name=_named(service, found.name))
        for field, found in line.values.items()
        if field not in view.command.positional
    }
    names = {found.name: field for field, found in typed.items()}
    passed = [word.partition("=")[0] for word in line.passed_on if word.startswith("--")]
    names |= {_named(service, word): word[2:].replace("-", "_") for word in passed}
    problems = [
        *(_named(service, problem) for problem in line.problems),
        *(f"{name}: {refused[field]}" for name, field in names.items() if field in refused),
    ]
    given = {**values, **{name: found for name, found in typed.items() if name not in refused}}
    if view.command.passes_on and line.passed_on:
        given[view.command.passes_on] = Given(line.passed_on, "")
    try:
        settings_of(view, given, at_start=at_start, problems=problems)
    except OptionsInvalid as error:
        named = tuple(f"{found.name}:" for found in given.values())
        for text in error.lines:
            is_named = text in problems or text.startswith(named)
            yield text if is_named else _named(service, text)


def _named(service: str, text: str) -> str:
    """`--weihgt: no such option; did you mean --weight?` as the user writes these options."""
    return re.sub(r"(^|\bdid you mean |\bor )--", rf"\1--{service}.", text)


_CHECKPOINTS = "checkpoints"


def config_of_run(model: Path) -> Path | None:
    """The configuration of the run that wrote this model or adapter; None if it is in no run."""
    config = RunDirectory(model.parent.parent).config
    return config if model.parent.name == _CHECKPOINTS and config.is_file() else None


def options_of_run(config: Path) -> tuple[dict[str, Any], Options]:
    """The options of the run's own command, and those of its environments.

    Raises:
        ValueError: the configuration cannot be read.
    """
    try:
        words, own = in_sections(read_file(config)[0])
    except ValueError as error:
        raise ValueError(f"{error}; pass --task") from None
    return own, by_service(words).get(ENV, {})
