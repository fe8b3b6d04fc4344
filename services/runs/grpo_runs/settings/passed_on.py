"""Options that `grpo-eval` passes on to a service, such as `--env.weight 3`: read as words, as a
section of a file or from a run, and checked in this process by the settings of that service."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from grpo_core.settings import CommandSettings, Given, OptionsInvalid, settings_of
from grpo_core.settings.options import options_of
from grpo_core.settings.sources import Arguments, read_file
from grpo_core.tree.environment import EnvironmentOptions
from grpo_core.tree.sections import ENVIRONMENT, SERVER, TRAINER
from grpo_runs.run_directory import RunDirectory, options_in

SERVICES = (TRAINER, SERVER, ENVIRONMENT)
UNKNOWN = ""
_OPTION = re.compile(rf"--({'|'.join(SERVICES)})\.([^=]+)(=.*)?", re.DOTALL)


def by_service(words: Iterable[str]) -> dict[str, list[str]]:
    """The words of each service, as it takes them itself: `--server.seed 3 --env.weight=3` →
    `{"server": ["--seed", "3"], "env": ["--weight=3"]}`. Words that are neither an option of a
    service nor a value of one are those of `UNKNOWN`.

    Of an option that is given twice, the last one counts.
    """
    found: dict[str, dict[str, list[str]]] = {}
    open_option: list[str] | None = None
    for word in words:
        if open_option is not None and not word.startswith("--"):
            open_option.append(word)
            continue
        match = _OPTION.fullmatch(word)
        service, name = (match[1], match[2].replace("_", "-")) if match else (UNKNOWN, word)
        options = found.setdefault(service, {})
        options.pop(name, None)
        options[name] = [f"--{name}{match[3] or ''}" if match else word]
        takes_value = word.startswith("--") and "=" not in word
        open_option = options[name] if takes_value else None
    return {service: [*chain(*options.values())] for service, options in found.items()}


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
                words += _words(service, option, held)
        else:
            raise ValueError(
                f"{key}: expected a section with one option per line, for example "
                "`max-staleness: 4`"
            )
    return words, rest


def _words(service: str, name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{service}.{'' if value else 'no-'}{name}"]
    if isinstance(value, list) and not any(isinstance(item, Mapping) for item in value):
        return [f"--{service}.{name}", *map(str, value)] if value else []
    text = json.dumps(value) if isinstance(value, Mapping | list) else str(value)
    return [f"--{service}.{name}={text}"]


_CHECKPOINTS = "checkpoints"
_GROUPS = EnvironmentOptions.command.groups
_OF_ITEMS = (*_GROUPS["Data"], *_GROUPS["Reward"], "eval_data", "held_out")
"""Options of a run's environments that its evaluation must have too."""


def config_of_run(model: Path) -> Path | None:
    """The configuration of the run that wrote this model or adapter; None if it is in no run."""
    config = RunDirectory(model.parent.parent).config
    return config if model.parent.name == _CHECKPOINTS and config.is_file() else None


def options_of_run(config: Path, refused: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """The options of the run by field, and the words for its environments without the options that
    are `refused`.

    Raises:
        ValueError: the configuration cannot be read.
    """
    try:
        own = options_in(read_file(config)[0])
    except ValueError as error:
        raise ValueError(f"{error}; pass --task") from None
    section = own.get(ENVIRONMENT)
    found = {name: own[name] for name in _OF_ITEMS if name in own}
    found |= {_field(name): value for name, value in section.items()} if section else {}
    words: list[str] = []
    for name in [name for name in found if name not in {*refused}]:
        words += _words(ENVIRONMENT, name.replace("_", "-"), found[name])
    return own, words


def _field(name: str) -> str:
    return str(name).replace("-", "_")


def mistakes_in(
    service: str,
    words: list[str],
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
    line = Arguments(view.command, options_of(view), words)
    typed = {
        field: found._replace(name=_named(service, found.name))
        for field, found in line.values.items()
        if field not in view.command.positional
    }
    names = {found.name: field for field, found in typed.items()}
    passed = [word.partition("=")[0] for word in line.passed_on if word.startswith("--")]
    names |= {_named(service, word): _field(word[2:]) for word in passed}
    problems = [*line.problems]
    problems += [f"{name}: {refused[field]}" for name, field in names.items() if field in refused]
    given = {**values, **{name: found for name, found in typed.items() if name not in refused}}
    if view.command.passes_on and line.passed_on:
        given[view.command.passes_on] = Given(line.passed_on, "")
    try:
        settings_of(view, given, at_start=at_start, problems=problems)
    except OptionsInvalid as error:
        own = tuple(f"{found.name}:" for found in values.values())
        for text in error.lines:
            yield text if text.startswith(own) else _named(service, text)


def _named(service: str, text: str) -> str:
    """`--weihgt: no such option; did you mean --weight?` as the user writes these options."""
    begin = "" if text.startswith(f"--{service}.") else "^|"
    return re.sub(rf"({begin}\bdid you mean |\bor )--", rf"\1--{service}.", text)
