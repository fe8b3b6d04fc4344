"""Formats `--help`: options under headings, with the default that applies, then examples."""

from __future__ import annotations

import argparse
import inspect
import shutil
import textwrap
from collections.abc import Mapping

from grpo_core.settings.command import CommandSettings
from grpo_core.settings.options import Option

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
    groups = {title: parser.add_argument_group(title) for title in titles}
    for option in options.values():
        if option.field in command.positional:
            groups["Arguments"].add_argument(
                option.field, metavar=option.name.upper(), help=_escaped(_described(option, None))
            )
        else:
            variable = command.variable(option.field)
            group = groups[heading.get(option.field, rest)]
            _add(group, option, _escaped(_described(option, variable)))
    _add_common(parser.add_argument_group("Configuration and help"))
    return parser.format_help()


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


def _add_common(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with options as keys. Environment variables and command-line options "
        "override the file",
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="Check the options, print the resulting configuration as YAML and start nothing",
    )
    group.add_argument("--version", action="store_true", help="Print the version")
    group.add_argument("--help", "-h", action="store_true", help="Print this text")


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
        if option.info.is_required() and option.field not in command.positional
    ]
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
