"""Texts that every command prints: `--help`, the resolved configuration, and mistakes."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import inspect
import re
import shlex
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr, ValidationError

from grpo_core.service_url import ServiceUrl, hide_passwords
from grpo_core.settings.command import Command, CommandSettings, Mistake
from grpo_core.settings.options import Option
from grpo_core.settings.sources import Given

_WIDTH = 100
_COLUMN = 30


def help_text(settings_type: type[CommandSettings], options: Mapping[str, Option]) -> str:
    command = settings_type.command
    parser = argparse.ArgumentParser(
        prog=command.prog,
        usage=_usage(settings_type, options),
        description=inspect.getdoc(settings_type),
        epilog=_epilog(settings_type),
        formatter_class=_Formatter,
        add_help=False,
    )
    heading = {name: title for title, names in command.groups.items() for name in names}
    rest = "Other options" if command.groups else "Options"
    titles = dict.fromkeys(["Arguments", *command.groups, rest])
    groups = {
        title: parser.add_argument_group(title, _named_only(command, title)) for title in titles
    }
    for option in options.values():
        if option.field in command.positional:
            groups["Arguments"].add_argument(
                option.field, metavar=option.name.upper(), help=_escaped(_described(option, None))
            )
        elif option.field not in command.brief:
            variable = command.variable(option.field)
            group = groups[heading.get(option.field, rest)]
            _add(group, option, _escaped(_described(option, variable)))
    common = parser.add_argument_group("Configuration and help")
    common.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with options as keys. Environment variables and command-line options "
        "override the file",
    )
    common.add_argument(
        "--dry-run",
        action="store_true",
        help="Check the options, print the resulting configuration as YAML and start nothing",
    )
    common.add_argument("--version", action="store_true", help="Print the version")
    common.add_argument("--help", "-h", action="store_true", help="Print this text")
    return parser.format_help()


def _named_only(command: Command, title: str) -> str | None:
    """The options below a heading that another command describes."""
    names = [name for name in command.groups.get(title, ()) if name in command.brief]
    if not names:
        return None
    listed = ", ".join(f"--{name.replace('_', '-')}" for name in names)
    return textwrap.fill(f"also {listed}", _WIDTH - 4, break_on_hyphens=False)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)
        super().__init__(prog, max_help_position=_COLUMN, width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


def _add(group: argparse._ArgumentGroup, option: Option, text: str) -> None:
    flag = f"--{option.name}"
    if option.is_flag:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    else:
        group.add_argument(flag, metavar=option.metavar, help=text)


def _described(option: Option, variable: str | None) -> str:
    notes = [f"default: {option.default}" if option.default else "required"]
    if variable:
        notes.append(f"environment: {variable}")
    return f"{(option.info.description or '').rstrip('.')} ({'; '.join(notes)})"


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _usage(settings_type: type[CommandSettings], options: Mapping[str, Option]) -> str:
    command = settings_type.command
    words = [command.prog, *(options[name].name.upper() for name in command.positional)]
    words += [
        f"--{option.name} {option.metavar}"
        for option in options.values()
        if option.default is None and option.field not in command.positional
    ]
    words += ["[FILE]"] if command.sections else []
    words.append("[options]")
    if command.passes_on:
        words.append(f"[{command.passes_on.replace('_', ' ')}]")
    return _escaped(" ".join(words))


def _epilog(settings_type: type[CommandSettings]) -> str:
    command = settings_type.command
    parts = []
    if command.env_prefix:
        parts.append(
            "Each option can also be set as an environment variable: "
            f"{command.env_prefix}<OPTION>, in capitals and with underscores."
        )
    if command.examples:
        parts.append("Examples:\n" + "\n".join(f"  {example}" for example in command.examples))
    return _escaped("\n\n".join(parts))


_SECRET_NAME = re.compile(r"(token|key|password|secret)$", re.IGNORECASE)
_SECRET_IN_TEXT = re.compile(r"(--[\w.-]*(?:token|key|password|secret)(?:=|\s+))\S+", re.IGNORECASE)


def resolved_yaml(command: Command, values: Mapping[str, Any]) -> str:
    """One `key: value` per line, under the headings of `--help`. Secrets become comments."""
    heading = {name: title for title, names in command.groups.items() for name in names}
    order = [name for names in command.groups.values() for name in names if name in values]
    lines: list[str] = []
    title = None
    for name in dict.fromkeys([*command.positional, *order, *values]):
        if title != heading.get(name) and (title := heading.get(name)):
            lines.append(f"{title}:" if command.sections else f"# {title}")
        is_inside = command.sections and name in heading
        key = "name" if is_inside and name == title else name
        lines += [f"  {line}" if is_inside else line for line in _lines(key, values[name])]
    return "\n".join(lines) + "\n"


def without_secrets(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words of a command line: those to show, and the names of options with a secret.

    `--hf-token X --seed 3` → `--seed 3` and `--hf-token`. Passwords in URLs become `***`.
    """
    shown: list[str] = []
    secret: list[str] = []
    follows_secret = False
    for word in words:
        name, separator, _ = word.partition("=")
        if name.startswith("--"):
            follows_secret = _SECRET_NAME.search(name) is not None
            if follows_secret:
                secret.append(name)
        if not follows_secret:
            shown.append(hide_passwords(word))
        elif separator:
            follows_secret = False
    return shown, secret


def hide_secrets(text: str) -> str:
    """`--hf-token X` → `--hf-token ***`, and `redis://user:X@host` → `redis://***@host`."""
    return hide_passwords(_SECRET_IN_TEXT.sub(r"\1***", text))


def _lines(name: str, value: Any) -> Iterator[str]:
    import yaml

    key = name.replace("_", "-")
    if isinstance(value, SecretStr):
        text = value.get_secret_value()
        if text != "none" and ("://" not in text or "@" in text or "?" in text):
            yield f"# {key}: ***"
            return
        value = text
    value, secrets = _split_secrets(value)
    yield from (f"# {key}: {secret} ***" for secret in secrets)
    if isinstance(value, ServiceUrl) and value.userinfo:
        yield f"# {key}: user and password ***"
    if isinstance(value, Path | ServiceUrl):
        value = str(value)
    elif isinstance(value, list):
        value = [str(one) if isinstance(one, Path | ServiceUrl) else one for one in value]
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
    yield f"{key}: {text}"


def _split_secrets(value: Any) -> tuple[Any, list[str]]:
    """The value as YAML takes it, without options whose name is that of a secret; their names."""
    if isinstance(value, Mapping):
        secrets = [name for name in value if _SECRET_NAME.search(name)]
        return {name: held for name, held in value.items() if name not in secrets}, secrets
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True), []
    if isinstance(value, tuple | list):
        if any(isinstance(item, BaseModel) for item in value):
            return [_split_secrets(item)[0] for item in value], []
        if not any(isinstance(word, str) for word in value):
            return list(value), []
        return without_secrets([*value])
    if isinstance(value, str) and "--" in value:
        with contextlib.suppress(ValueError):  # not words of a shell
            shown, secrets = without_secrets(shlex.split(value))
            return (shlex.join(shown), secrets) if secrets else (value, [])
    return value, []


_OWN = "value_error"
IS_REQUIRED = "is required"
OF_ANOTHER = (IS_REQUIRED, "needs --", "has no effect without --")
"""Mistakes about an option that is absent, which a misspelt option seems to be."""


def problems_by_field(error: ValidationError, options: Mapping[str, Option]) -> Iterator[Mistake]:
    """Args: options: by name; those of a section have dotted names"""
    for problem in error.errors():
        place = [*map(str, problem["loc"])]
        names = [".".join(place[:end]) for end in range(len(place), 0, -1)]
        name = next((one for one in names if one in options), None)
        message = problem["msg"].removeprefix("Value error, ")
        if name is None:
            reason = "no such key" if problem["type"] == "extra_forbidden" else message
            yield Mistake(None, f"{names[0]}: {reason}" if names else reason)
            continue
        option = options[name]
        if problem["type"] == "missing":
            text = (option.info.description or option.expected).partition(". ")[0].rstrip(".")
            choices = f": {', '.join(map(str, option.choices))}" if option.choices else ""
            yield Mistake(name, f"{IS_REQUIRED}. {text}{choices}")
        elif problem["type"] == _OWN:
            yield Mistake(name, f"{message}{_got(option, problem['input'])}")
        else:
            near = difflib.get_close_matches(str(problem["input"]), map(str, option.choices), n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            got = _got(option, problem["input"])
            expected = option.expected
            if problem["type"] in ("too_short", "string_too_short"):
                expected = "at least one value" if option.is_list else "a value that is not empty"
            yield Mistake(name, f"expected {expected}{got}{hint}")


def name_of(command: Command, option: Option, given: Mapping[str, Given]) -> str:
    """The name that the user wrote, or the one to write."""
    if option.field in given:
        return given[option.field].name
    return option.name.upper() if option.field in command.positional else f"--{option.name}"


def _got(option: Option, value: Any) -> str:
    if option.is_secret:
        return "; the value is not shown"
    if value is None:
        return ""
    return f"; got {hide_passwords(str(value))!r}"
