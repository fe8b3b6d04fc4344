"""Reads the YAML file of `--config`: its keys are option names, with dashes or underscores."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_core.settings.command import Command, CommandSettings
from grpo_core.settings.command_line import Given, merge
from grpo_core.settings.names import Names
from grpo_core.settings.options import Option


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
