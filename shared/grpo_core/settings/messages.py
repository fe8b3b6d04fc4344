"""Turns pydantic's errors into one line each that names the option, what it takes and the value."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from grpo_core.settings.command import Command
from grpo_core.settings.command_line import Given
from grpo_core.settings.options import Option

_OWN = "value_error"


def lines_of(
    error: ValidationError,
    command: Command,
    options: Mapping[str, Option],
    given: Mapping[str, Given],
) -> Iterator[str]:
    for problem in error.errors():
        field_name = str(problem["loc"][0]) if problem["loc"] else ""
        message = problem["msg"].removeprefix("Value error, ")
        if field_name not in options:
            yield message
            continue
        option = options[field_name]
        where = name_of(command, option, given)
        if problem["type"] == "missing":
            yield f"{where} is required. {_first_sentence(option)}"
        elif problem["type"] == _OWN:
            yield f"{where}: {message}{_got(option, problem['input'])}"
        else:
            got = _got(option, problem["input"]) + _near(option, problem)
            yield f"{where}: expected {_expected(option, problem)}{got}"


def name_of(command: Command, option: Option, given: Mapping[str, Given]) -> str:
    """The name that the user wrote, or the one to write."""
    if option.field in given:
        return given[option.field].name
    return option.name.upper() if option.field in command.positional else f"--{option.name}"


def _expected(option: Option, problem: Any) -> str:
    if problem["type"] in ("too_short", "string_too_short"):
        return "at least one value" if option.is_list else "a value that is not empty"
    return option.expected


def _near(option: Option, problem: Any) -> str:
    near = difflib.get_close_matches(str(problem["input"]), map(str, option.choices), n=1)
    return f", did you mean {near[0]}?" if near else ""


def _got(option: Option, value: Any) -> str:
    if option.is_secret:
        return "; the value is not shown"
    if value is None:
        return ""
    return f"; got {str(value)!r}"


def _first_sentence(option: Option) -> str:
    text = (option.info.description or option.expected).partition(". ")[0].rstrip(".")
    return f"{text}: {', '.join(map(str, option.choices))}" if option.choices else text
